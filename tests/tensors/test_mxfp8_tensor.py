"""MXFP8Tensor: quantize_mxfp8, buffers, copies, what may write to it, products of two formats."""

import pytest
import torch
from cases.mxfp8 import ALL, NAMES, assert_quantized, make
from helpers import assert_bytes_equal, at_an_odd_address
from tensor_helpers import DTYPES, addresses, assert_record_equal, values
from torch import nn

import zerofp4
from zerofp4 import reference
from zerofp4.format import MXFP8_DATA_DTYPE, MXFP8_SCALE_DTYPE

# quantize_mxfp8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 64), (34, 50), (1, 1), (130, 288)])
def test_quantize_fills_every_buffer(device, shape, dtype):
    x = values(*shape, device=device, dtype=dtype)
    t = zerofp4.quantize_mxfp8(x, **ALL)
    assert (t.shape, t.dtype, t.device, t.block) == (x.shape, dtype, x.device, (1, 32))
    assert [name for name, _ in t.record.buffers()] == list(NAMES)
    assert t.rowwise_data.dtype == t.columnwise_data.dtype == MXFP8_DATA_DTYPE
    assert t.rowwise_scale.dtype == t.columnwise_scale_swizzled.dtype == MXFP8_SCALE_DTYPE
    assert_quantized(t, x)
    expected = reference.dequantize_mxfp8(t.rowwise_data, t.rowwise_scale, False, dtype)
    assert_bytes_equal(t.dequantize(), expected, "values")


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_at_an_odd_address(dtype):
    x = at_an_odd_address(values(96, 288, dtype=dtype))
    assert_quantized(zerofp4.quantize_mxfp8(x, **ALL), x)


def test_quantize_flattens_and_copies_what_is_not_contiguous(device):
    x = values(5, 6, 64, device=device).transpose(0, 1)
    t = zerofp4.quantize_mxfp8(x, columnwise=True)
    assert t.shape == (6, 5, 64) and t.dequantize().shape == (6, 5, 64)
    assert_quantized(t, x.reshape(30, 64))


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
def test_one_side(device, rowwise, columnwise):
    x = values(34, 50, device=device)
    t = zerofp4.quantize_mxfp8(x, rowwise=rowwise, columnwise=columnwise)
    side = "columnwise" if columnwise else "rowwise"
    assert [name for name, _ in t.record.buffers()] == [f"{side}_data", f"{side}_scale"]
    assert_quantized(t, x)
    data, scale = getattr(t, f"{side}_data"), getattr(t, f"{side}_scale")
    assert_bytes_equal(t.dequantize(), reference.dequantize_mxfp8(data, scale, columnwise, x.dtype), "values")
    with pytest.raises(ValueError, match=f"no {'columnwise' if rowwise else 'rowwise'} copy"):
        t.swizzled_scale(columnwise=rowwise)


def test_swizzled_scales_with_and_without_a_buffer(device):
    stored, bare = make(device, (34, 70)), make(device, (34, 70), scale_layouts=["compact"])
    for columnwise in (False, True):
        side = "columnwise" if columnwise else "rowwise"
        assert stored.swizzled_scale(columnwise) is getattr(stored, f"{side}_scale_swizzled")
        assert_bytes_equal(bare.swizzled_scale(columnwise), stored.swizzled_scale(columnwise), side)
        assert bare.swizzled_scale(columnwise).dtype == MXFP8_SCALE_DTYPE


def test_out_takes_new_values_in_the_same_places(device):
    t = make(device)
    for _, buffer in t.record.buffers():
        buffer.view(torch.uint8).fill_(0xA5)
    before, version = addresses(t), t._version
    x = values(48, 80, device=device, seed=1).requires_grad_()
    assert zerofp4.quantize_mxfp8(x, out=t) is t
    assert_quantized(t, x.detach())
    assert addresses(t) == before and t._version > version and not t.requires_grad
    for flag, kept in ((1.0, x), (torch.inf, x), (0.0, -x)):
        zerofp4.quantize_mxfp8(-x, out=t, skip=torch.tensor([flag], device=device))
        assert_quantized(t, kept.detach())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": [[1.0, 2.0]]}, TypeError, "x must be a plain torch.Tensor, got list"),
        ({"x": torch.zeros(4, 4, dtype=torch.int32)}, TypeError, "x must have one of the dtypes .*int32"),
        ({"x": torch.zeros(16)}, ValueError, r"at least 2 dimensions, got shape \(16,\)"),
        ({"rowwise": False}, ValueError, "both False"),
        ({"scale_layouts": ["expanded"]}, ValueError, "scale_layouts .*'expanded'"),
        ({"scale_layouts": "swizzled"}, ValueError, "must be a sequence of names"),
        ({"skip": torch.zeros(1)}, ValueError, "skip keeps what out has, but there is no out"),
        ({"skip": 1.0, "out": make()}, TypeError, "skip must be a torch.float32 tensor, got float"),
        ({"out": torch.zeros(48, 80)}, TypeError, "out must be an MXFP8Tensor, got Tensor"),
        ({"out": zerofp4.empty((48, 80))}, TypeError, "out must be an MXFP8Tensor, got NVFP4Tensor"),
        ({"out": make(shape=(80, 48))}, ValueError, r"out must have x's shape .*48, 80.* got .*80, 48"),
        ({"out": make(columnwise=False), "columnwise": True}, ValueError, "out must have columnwise scales"),
    ],
)
def test_quantize_refuses(options, error, message):
    with pytest.raises(error, match=message):
        zerofp4.quantize_mxfp8(**{"x": values(48, 80), **options})


def test_quantizing_twice_is_refused():
    for quantize in (zerofp4.quantize, zerofp4.quantize_mxfp8):
        with pytest.raises(TypeError, match=r"x must be a plain .*, got MXFP8Tensor"):
            quantize(make())


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (2, 0, 16)])
def test_no_elements(device, shape):
    t = zerofp4.quantize_mxfp8(torch.empty(shape, device=device), **ALL)
    assert t.dequantize().shape == t.clone().shape == shape and "MXFP8Tensor" in repr(t)
    t.copy_(torch.empty(shape)).zero_()
    assert t.swizzled_scale().numel() == t.swizzled_scale(columnwise=True).numel() == 0


# Copies, and what is shared


def test_flatten_names_what_exists_and_unflatten_restores_it():
    for options, expected in (({}, NAMES), ({"columnwise": False, "scale_layouts": []}, NAMES[:2])):
        t = make(**options)
        names, context = t.__tensor_flatten__()
        assert names == list(expected)
        inner = {name: getattr(t, name) for name in names}
        new = zerofp4.MXFP8Tensor.__tensor_unflatten__(inner, context, t.shape, t.stride())
        assert_record_equal(new, t)
        assert (new.shape, new.dtype) == (t.shape, t.dtype)
    scales = "rowwise=compact+swizzled, columnwise=compact+swizzled"
    options = f"dtype=torch.bfloat16, block=(1, 32), device=cpu, {scales}"
    assert repr(make()) == f"MXFP8Tensor(shape=(48, 80), {options})"


# Writing


def test_copies_of_values_and_of_bytes(device):
    t, x = make(device), values(48, 80, dtype=torch.float32, seed=1)
    before = addresses(t)
    assert t.copy_(x) is t
    assert_quantized(t, x.to(device, t.dtype))
    t.copy_(x[0].double())  # broadcasts
    assert_quantized(t, x[0].expand(48, 80).to(device, t.dtype))
    bytes_of_another = make(device, scale_layouts=["compact"])
    bytes_of_another.rowwise_data.view(torch.uint8)[0, 0] = 0x7E  # which no quantization of its values gives
    t.copy_(bytes_of_another)
    assert_record_equal(
        t, bytes_of_another, ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")
    )
    for columnwise in (False, True):
        expected = bytes_of_another.swizzled_scale(columnwise)
        assert_bytes_equal(t.swizzled_scale(columnwise), expected, "swizzled")
    nvfp4 = zerofp4.quantize(x.to(device))
    t.copy_(nvfp4)
    assert_quantized(t, nvfp4.dequantize(t.dtype))
    for act, value in ((lambda: t.fill_(-0.3), -0.3), (lambda: t.fill_(-0.0), -0.0), (t.zero_, 0.0)):
        assert act() is t
        assert_quantized(t, torch.full((48, 80), value, dtype=t.dtype, device=device))
    assert addresses(t) == before


def test_one_copy_does_not_give_the_other(device):
    rows, both = make(device, columnwise=False), make(device)
    before = both.clone()
    with pytest.raises(ValueError, match="the source has no columnwise copy"):
        both.copy_(rows)
    assert_record_equal(both, before)


# Products


def test_a_product_of_two_formats_and_what_it_saves():
    a, b = nn.Parameter(make()), nn.Parameter(zerofp4.quantize(values(80, 32)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = a @ b
    assert sorted(type(t).__name__ for t in kept) == ["MXFP8Tensor", "NVFP4Tensor"]
    torch.testing.assert_close(out, a.dequantize() @ b.dequantize(), rtol=0, atol=0)
    out.sum().backward()
    assert type(a.grad) is type(b.grad) is torch.Tensor and a.grad.dtype == torch.bfloat16
