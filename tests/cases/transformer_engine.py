"""Weights of TransformerEngine's kind and whole masters, and what every buffer must become."""

from __future__ import annotations

import torch
from helpers import assert_bytes_equal

from cases import te_stand_in
from cases.te_stand_in import NVFP4Tensor, buffers_of
from zerofp4 import reference

# Scales of whole atoms; of padded rows; of padded columns, K = 288 among them; of both, in both copies.
SHAPES = [(128, 64), (16, 64), (128, 288), (48, 288), (16, 16), (272, 144)]


def make(device, shapes=SHAPES, dtype=torch.bfloat16, *, columnwise: bool = True, seed: int = 0):
    """(poisoned weights, float32 masters of all their elements, start offsets)"""
    generator = torch.Generator().manual_seed(seed)
    weights = [te_stand_in.make(shape, dtype, device, columnwise=columnwise) for shape in shapes]
    masters = [torch.randn(weight.numel(), generator=generator).to(device) for weight in weights]
    return weights, masters, [0] * len(weights)


def expected_buffers(weight: NVFP4Tensor, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the buffers that the weight has, padding included."""
    rows, cols = weight.shape
    specified = reference.quantize(whole.view(rows, cols).to(weight.dtype))
    expected = {
        "_rowwise_data": specified.rowwise_data,
        "_rowwise_scale_inv": reference.expand_scale(specified.rowwise_scale, rows, cols, 16),
        "_amax_rowwise": specified.amax,
        "_columnwise_data": specified.columnwise_data,
        "_columnwise_scale_inv": reference.expand_scale(specified.columnwise_scale, cols, rows, 16),
        "_amax_columnwise": specified.amax,
    }
    return {name: expected[name] for name in buffers_of(weight)}


def check(weights, masters, *, columnwise_codes: bool = True) -> None:
    """Every buffer is what quantizing the whole master gives; without `columnwise_codes` but for those."""
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        for name, expected in expected_buffers(weight, master).items():
            if columnwise_codes or name != "_columnwise_data":
                actual = getattr(weight, name)
                if "scale" in name:
                    expected = expected.view(torch.uint8)
                assert_bytes_equal(actual, expected, f"weight {i} of {tuple(weight.shape)}: {name}")


def places(weights) -> list[dict[str, tuple[int, int]]]:
    """Which tensors the buffers are, and where."""
    return [{n: (id(b), b.data_ptr()) for n, b in buffers_of(weight).items()} for weight in weights]


def contents(weights) -> list[dict[str, torch.Tensor]]:
    return [{n: b.clone() for n, b in buffers_of(weight).items()} for weight in weights]


def check_untouched(weights, before) -> None:
    for i, (weight, buffers) in enumerate(zip(weights, before, strict=True)):
        for name, buffer in buffers.items():
            assert_bytes_equal(getattr(weight, name), buffer, f"weight {i}: {name}")
