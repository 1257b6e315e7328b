"""Gradients through quantization, and inputs that torch reads otherwise than their bytes say."""

import pytest
import torch
from helpers import assert_bytes_equal
from tensor_helpers import ALL, FORMATS, assert_record_equal, make, values
from torch.nn import functional as F

import zerofp4
from zerofp4 import reference

# Gradients


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_straight_through_gradient_is_that_of_the_values(device, options):
    x = values(48, 80, device=device, dtype=torch.float32).requires_grad_()
    inputs = values(4, 80, device=device, dtype=torch.float32, seed=1)
    options = {"columnwise": True, **options}
    t = zerofp4.quantize(x, **options, straight_through=True)
    assert_record_equal(t, zerofp4.quantize(x, **options))
    assert type(t) is zerofp4.NVFP4Tensor and t.requires_grad and not t.is_leaf
    leaf = t.detach().dequantize().requires_grad_()
    for weight in (t, leaf):
        F.linear(inputs, weight).square().sum().backward()
    # The sums of a gradient run in another order.
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-4, atol=1e-3)
    assert type(x.grad) is torch.Tensor and x.grad.dtype == x.dtype


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_straight_through(device, backend):
    def loss(x):
        weight = zerofp4.quantize(x, straight_through=True)
        return F.linear(torch.ones(2, 80, device=x.device), weight).square().sum()

    x = values(48, 80, device=device, dtype=torch.float32).requires_grad_()
    torch._dynamo.reset()
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        results.append((function(x), *torch.autograd.grad(function(x), x)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)  # sums in another order


def test_straight_through_is_asked_for_and_not_for_out():
    x = values(48, 80).requires_grad_()
    assert not zerofp4.quantize(x).requires_grad
    assert not zerofp4.quantize(x.detach(), straight_through=True).requires_grad
    with pytest.raises(ValueError, match="straight_through gives a new tensor a history, which out cannot"):
        zerofp4.quantize(x, out=make("cpu"), columnwise=True, straight_through=True)
    zerofp4.quantize(x, straight_through=True).dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# Arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_negative_bit_is_a_sign(device, dtype):
    x = values(48, 80, device=device, dtype=dtype)
    lazy = torch._neg_view(x)
    assert lazy.is_neg()
    assert_record_equal(zerofp4.quantize(lazy, **ALL), zerofp4.quantize(-x, **ALL))
    assert_record_equal(zerofp4.quantize(lazy, out=zerofp4.quantize(x)), zerofp4.quantize(-x))
    assert_record_equal(zerofp4.quantize(x).copy_(lazy), zerofp4.quantize(-x))
    assert_bytes_equal(zerofp4.quantize_dequantize(lazy), zerofp4.quantize_dequantize(-x), "values")
    mxfp8 = zerofp4.quantize_mxfp8
    assert_record_equal(mxfp8(lazy), mxfp8(-x))
    assert_record_equal(mxfp8(x).copy_(lazy), mxfp8(-x))
    groups = zerofp4.quantize_grouped
    assert_record_equal(groups(lazy, [16, 32])[1], groups(-x, [16, 32])[1])
    imaginary = torch.complex(x.float(), x.float()).conj().imag
    assert imaginary.is_neg()
    assert_record_equal(zerofp4.quantize(imaginary), zerofp4.quantize(-x.float()))


def test_a_lazily_negated_argument_is_refused():
    x = values(48, 80)
    with pytest.raises(ValueError, match=r"amax has its negative bit set.*pass its resolve_neg\(\)"):
        zerofp4.quantize(x, amax=torch._neg_view(torch.ones(1)))


def test_an_amax_of_the_output_is_read_before_it_is_written(device):
    two = {"block": (1, 16), "columnwise": True, "hadamard": True}
    x, first = values(48, 80, device=device), values(48, 80, device=device, seed=1) * 3
    for name, source, options in (
        ("amax", "columnwise_amax", two),
        ("columnwise_amax", "amax", two),
        ("amax", "amax", {}),
    ):
        out = zerofp4.quantize(first, **options)
        given = getattr(out, source).clone()
        zerofp4.quantize(x, out=out, **{name: getattr(out, source)}, **options)
        assert_record_equal(out, zerofp4.quantize(x, **{name: given}, **options))


def test_the_sign_of_a_scale_byte_means_nothing(device):
    t = make(device, columnwise=False, scale_layouts=["compact"])
    expected = t.dequantize()
    t.rowwise_scale.view(torch.uint8).bitwise_or_(0x80)
    assert_bytes_equal(t.dequantize(), expected, "kernel")
    specified = reference.dequantize(t.rowwise_data, t.rowwise_scale, t.amax, 16, t.dtype)
    assert_bytes_equal(specified, expected, "reference")
    scale = t.rowwise_scale
    x, amax = values(48, 80, device=device), t.amax
    unsigned = (scale.view(torch.uint8) & 0x7F).view(scale.dtype)
    assert_bytes_equal(
        reference.encode(x, scale, amax, 16),
        reference.encode(x, unsigned, amax, 16),
        "codes of the reference",
    )
