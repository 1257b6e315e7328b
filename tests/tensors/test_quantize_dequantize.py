"""Fake quantization: the bytes of dequantize(quantize(x)), and a gradient that passes straight through."""

import pytest
import torch
from cases.ops import DTYPES, KINDS, SHAPES, draw_values, marked
from cases.quantize import CHOICES
from helpers import assert_all_equal, assert_bytes_equal, assert_values_equal, poisoned_allocations
from hypothesis import given
from hypothesis import strategies as st
from tensor_helpers import values

import zerofp4
from zerofp4 import FourOverSix, reference

ZEROFP4 = torch.ops.zerofp4
MODES = {"nearest": {}, "stochastic": {"stochastic_rounding": True}}
MODES |= {str(choice): {"four_over_six": choice} for choice in CHOICES}


def both(x, seed=0, **options):
    """(quantize_dequantize(x), quantize(x).dequantize()), with generators of the same seed."""
    results = []
    for function in (zerofp4.quantize_dequantize, lambda x, **o: zerofp4.quantize(x, **o).dequantize()):
        if options.get("stochastic_rounding"):
            options["generator"] = torch.Generator().manual_seed(seed)
        with poisoned_allocations():
            results.append(function(x, **options))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", marked("threads", SHAPES, (256, 512)))
def test_equals_dequantize_of_quantize(device, shape, dtype, block, mode):
    x = values(*shape, device=device, dtype=dtype)
    actual, expected = both(x, block=block, **MODES[mode])
    assert type(actual) is torch.Tensor
    assert_bytes_equal(actual, expected, f"{shape} {dtype} {block} {mode}")


@pytest.mark.cpu_kernel
def test_equals_the_specification(device):
    x = values(50, 96, device=device)
    for block_rows, choice in ((1, None), (16, None), (16, FourOverSix())):
        q = reference.quantize(x, block_rows, four_over_six=choice)
        e4m3_max = 448 if choice is None else 256
        side = (q.rowwise_data, q.rowwise_scale, q.amax, block_rows, x.dtype, e4m3_max)
        actual = zerofp4.quantize_dequantize(x, block=(block_rows, 16), four_over_six=choice)
        assert_bytes_equal(actual, reference.dequantize(*side), f"{block_rows} {choice}")


@pytest.mark.cpu_kernel
@given(
    rows=st.integers(1, 150),
    half=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([(16, 16), (1, 16)]),
    mode=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn(device, rows, half, dtype, kind, block, mode, seed):
    x = draw_values(seed, rows * 2 * half, kind).view(rows, 2 * half).to(dtype).to(device)
    assert_values_equal(*both(x, seed, block=block, **MODES[mode]), f"{tuple(x.shape)} {dtype} {kind} {mode}")


@pytest.mark.parametrize("mode", MODES)
def test_given_amax(device, mode):
    x, amax = values(34, 80, device=device), torch.tensor([1.5], device=device)
    assert_bytes_equal(*both(x, amax=amax, **MODES[mode]), mode)


@pytest.mark.parametrize("shape", [(3, 14, 48), (0, 16), (16, 0), (2, 0, 4)])
def test_shapes(device, shape):
    x = values(*shape, device=device)
    actual, expected = both(x)
    assert actual.shape == shape
    assert_bytes_equal(actual, expected, f"{shape}")
    assert_bytes_equal(*both(x.transpose(0, 1).contiguous().transpose(0, 1)), "strides")


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.mT, lambda x: x.expand(2, 34, 80)])
def test_the_gradient_passes_straight_through(device, view):
    leaf = values(34, 80, device=device).requires_grad_()
    x = view(leaf)
    amax = torch.full((1 if x.dim() == 2 else 2,), 0.5, device=device)  # also where values saturate
    result = zerofp4.quantize_dequantize(x, amax=amax)
    gradient = values(*x.shape, device=device, seed=1)
    result.backward(gradient)
    expected = gradient.sum_to_size(leaf.shape) if x.dim() == 3 else gradient.view(x.shape)
    assert torch.equal(view(leaf.grad) if x.dim() == 2 else leaf.grad, expected)


def test_no_gradient_where_none_is_wanted(device):
    x = values(34, 80, device=device).requires_grad_()
    assert not zerofp4.quantize_dequantize(x.detach()).requires_grad
    with torch.no_grad():
        assert not zerofp4.quantize_dequantize(x).requires_grad


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(4, 5), {}, ValueError, "last dimension must be even, got 5"),
        (zerofp4.quantize(torch.zeros(4, 4)), {}, TypeError, "x must be a plain torch.Tensor"),
        (torch.zeros(4, 4), {"amax": torch.zeros(2)}, ValueError, r"amax must have shape \(1,\)"),
    ],
)
def test_refuses(x, options, error, message):
    """As quantize, whose rules these are."""
    with pytest.raises(error, match=message):
        zerofp4.quantize_dequantize(x, **options)


# Compiled


@pytest.mark.heavy
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("index", range(3))
def test_opcheck(device, index, requires_grad):
    x = torch.randn(32, 48, device=device, requires_grad=requires_grad)
    amax, state = torch.ones(1, device=device), torch.tensor([1, 2], device=device)
    calls = [(x, 16, None, None, 0, "mae"), (x, 1, amax, state, 0, "mae"), (x, 16, amax, None, 256, "mse")]
    torch.library.opcheck(ZEROFP4.quantize_dequantize.default, calls[index])


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(device, backend):
    # On a CPU only what Inductor has a library for is around the operator: the kernels that it would write
    # take a C++ compiler most of a minute, and are not ours.
    scale = torch.mul if device.type == "cuda" else torch.mm
    factor = values(80, 80, device=device, dtype=torch.float32, seed=1)

    def function(x):
        return scale(zerofp4.quantize_dequantize(scale(x, factor), four_over_six=FourOverSix()), factor)

    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        x = values(80, 80, device=device, dtype=torch.float32).requires_grad_()
        result = call(x)
        result.backward(torch.ones_like(result))
        results.append((result, x.grad))
    assert_all_equal(*results, "compiled")
