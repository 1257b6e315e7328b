"""torchao's quantization in plain torch: the same bytes where both round alike, and what differs elsewhere.

Its scale of a block is (block_amax / 6) / (amax / 2688) and at least 2^-6; ours is block_amax *
((2688 / amax) * (1/6)), and may be smaller, or 0. Where 2688 / amax is a power of two both round alike.
"""

from __future__ import annotations

import pytest
import torch
from cases.ops import SHAPES
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference

pytest.importorskip("torchao")

from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor, utils

SMALLEST = 8  # the byte of torchao's smallest scale


def theirs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of the scales, and codes."""
    scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scale, codes = nvfp4_tensor.nvfp4_quantize(x, 16, scale)
    return scale.view(torch.uint8), codes


def ours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    t = zerofp4.quantize(x, block=(1, 16))
    return t.rowwise_scale.view(torch.uint8), t.rowwise_data


def of_blocks(scale: torch.Tensor, codes: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return codes.view(*scale.shape, 8)[chosen]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block_amax_under_an_amax_that_is_exact(dtype):
    """Each bfloat16 up to 42 is the largest of a block."""
    amax = torch.arange(0x0080, 0x4229, dtype=torch.int16).view(torch.bfloat16)
    pattern = torch.linspace(-1, 1, 16)
    x = (amax.float()[:, None] * pattern).to(dtype).contiguous()
    assert x.abs().max() == 42  # 2688 / 64
    (scale, codes), (expected_scale, expected_codes) = ours(x), theirs(x)
    normal = scale > SMALLEST
    assert 0.05 < normal.float().mean() and (expected_scale[~normal] == SMALLEST).all()
    assert_bytes_equal(scale[normal], expected_scale[normal], "scales")
    assert_bytes_equal(of_blocks(scale, codes, normal), of_blocks(scale, expected_codes, normal), "codes")


@pytest.mark.parametrize("factor", [1.0, 100.0, 1e-3, 0.37])
def test_any_amax(factor):
    """A scale is the same or a neighbour; under the same scale a code is the same or a neighbour."""
    x = (torch.randn(130, 288, generator=torch.Generator().manual_seed(0)) * factor).bfloat16()
    x[3, 16:32] = 0
    (scale, codes), (expected_scale, expected_codes) = ours(x), theirs(x)
    assert scale[3, 1] == 0 and expected_scale[3, 1] == SMALLEST
    normal = scale >= SMALLEST
    distance = (scale.int() - expected_scale.int()).abs()
    assert distance[normal].max() <= 1 and (distance[normal] > 0).float().mean() < 0.02
    same = distance == 0
    mine, other = (reference.unpack(of_blocks(scale, each, same)) for each in (codes, expected_codes))
    signs_differ = (mine ^ other) >> 3
    steps = ((mine & 7).int() - (other & 7).int()).abs()
    assert not signs_differ.any() and steps.max() <= 1 and (steps > 0).float().mean() < 0.01


def test_values():
    """Of the same codes and scales: (scale * (amax / 2688)) there, ((scale * amax) * (1/2688)) here."""
    x = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    t = zerofp4.quantize(x, block=(1, 16))
    scale = nvfp4_tensor.per_tensor_amax_to_scale(t.amax[0])
    other = nvfp4_tensor.NVFP4Tensor(t.rowwise_data, t.rowwise_scale, 16, torch.float32, scale)
    torch.testing.assert_close(t.dequantize(torch.float32), other.dequantize(), rtol=3e-7, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzled_scales(shape):
    t = zerofp4.quantize(torch.randn(shape), block=(1, 16), scale_layouts=["swizzled"])
    compact, swizzled = (s.view(torch.uint8) for s in (t.rowwise_scale, t.rowwise_scale_swizzled))
    assert_bytes_equal(swizzled.flatten(), utils.to_blocked(compact).flatten(), "swizzled")
    assert_bytes_equal(
        compact, utils.from_blocked(swizzled.flatten(), *compact.shape).contiguous(), "compact"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp8(dtype):
    """Scales that are rounded up, over all magnitudes that both know."""
    x = torch.randn(130, 288, generator=torch.Generator().manual_seed(0))
    x = (x * torch.logspace(-25, 25, 130)[:, None]).to(dtype)
    x[5, :32] = 0
    scale, data = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, mx_tensor.ScaleCalculationMode.RCEIL)
    t = zerofp4.quantize_mxfp8(x)
    assert_bytes_equal(t.rowwise_scale.view(torch.uint8), scale.view(torch.uint8), "scales")
    assert_bytes_equal(t.rowwise_data.view(torch.uint8), data.view(torch.uint8), "data")
