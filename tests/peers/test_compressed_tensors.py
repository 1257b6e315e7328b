"""compressed-tensors, whose files serving engines read: how it packs codes, and what its values are."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference

helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """Of E2M1, in bfloat16."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16)
    signs = torch.where(codes >= 8, -1.0, 1.0).bfloat16()
    return magnitudes[(codes & 7).long()] * signs


def test_every_pair_of_codes():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = values_of(reference.unpack(packed))
    assert_bytes_equal(helpers.pack_fp4_to_uint8(values), packed, "packed")
    assert_bytes_equal(helpers.unpack_fp4_from_uint8(packed, 16, 32), values, "unpacked")


def test_values_of_a_quantized_tensor():
    """A file has our codes, our scales and 2688 / amax: codes * (scale / that) there."""
    x = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    t = zerofp4.quantize(x, block=(1, 16))
    codes = helpers.unpack_fp4_from_uint8(t.rowwise_data, *x.shape, dtype=torch.float32)
    scale = t.rowwise_scale.float() / (2688 / t.amax)
    values = (codes.view(48, 6, 16) * scale[..., None]).view(x.shape)
    torch.testing.assert_close(values, t.dequantize(torch.float32), rtol=3e-7, atol=0)
