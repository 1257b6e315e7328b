"""MXFP8Tensor in torch: what may write to it, products, torch.compile."""

import pytest
import torch
from cases.mxfp8 import assert_quantized, make
from helpers import assert_bytes_equal
from tensor_helpers import addresses, assert_record_equal, values
from torch import nn

import zerofp4

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


@pytest.mark.heavy
def test_compiled_copy_and_clone(device):
    def write(t, x):
        t.copy_(x)
        return t.clone(), t.swizzled_scale(columnwise=True).view(torch.uint8) + 0

    torch._dynamo.reset()
    t, x = make(device), values(48, 80, device=device, seed=1)
    before = addresses(t)
    clone, scale = torch.compile(write, fullgraph=True, backend="aot_eager")(t, x)
    assert addresses(t) == before
    assert_quantized(t, x)
    assert_record_equal(clone, t)
    assert clone.rowwise_data.data_ptr() != t.rowwise_data.data_ptr()
    assert_bytes_equal(scale, t.columnwise_scale_swizzled.view(torch.uint8), "swizzled")
