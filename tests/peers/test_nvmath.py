"""nvmath-python, NVIDIA's own helpers for block-scaled products, where it is installed: what it says of the
places of scales and of the order of nibbles is what we write. It takes whole atoms only, without padding.
"""

import itertools

import pytest
import torch
from helpers import assert_bytes_equal
from tensor_helpers import values

import zerofp4
from zerofp4 import Operand, ops
from zerofp4.format import BLOCK, MXFP8_BLOCK, SCALE_DTYPE
from zerofp4.gemm import native

nvmath = pytest.importorskip("nvmath.linalg.advanced.helpers.matmul", reason="nvmath-python is not installed")
NVFP4, MXFP8 = (getattr(nvmath.BlockScalingFormat, name) for name in ("NVFP4", "MXFP8"))

# Rows and contraction of operands: one atom, several along, several down, both.
SHAPES = [(128, 128), (128, 512), (384, 128), (256, 384)]
CODES = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])


def nvmath_offsets(rows: int, columns: int, shape: tuple[int, int], format) -> torch.Tensor:
    index = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return nvmath.get_block_scale_offset(index, shape, format, axis=-1)


def coded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two byte matrices that together say of an element where it was."""
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return tuple((part % 120).to(torch.uint8) for part in (i * columns + j, (i * columns + j) // 120))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_of_nvfp4_scales(device, shape):
    rows, columns = shape[0], shape[1] // BLOCK
    places = nvmath_offsets(rows, columns, shape, NVFP4)
    assert places.flatten().sort().values.equal(torch.arange(rows * columns))
    for marks in coded(rows, columns):
        swizzled = zerofp4.swizzle_scales([(marks.view(SCALE_DTYPE).to(device), shape)])[0].cpu()
        assert_bytes_equal(swizzled.view(torch.uint8).flatten()[places], marks, "at nvmath's offsets")
        theirs = nvmath.to_block_scale(marks.view(SCALE_DTYPE), shape, NVFP4, axis=-1)
        assert_bytes_equal(swizzled.flatten(), theirs, "to_block_scale")


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_that_quantize_writes(device, shape, side):
    """Blocked along the contraction of the product, which of the columnwise copy is M."""
    x = values(*(shape if side == "rowwise" else shape[::-1]), device=device)
    copies = {"rowwise": side == "rowwise", "columnwise": side == "columnwise"}
    t = zerofp4.quantize(x, block=(1, 16), scale_layouts=["swizzled"], **copies)
    compact, swizzled = (getattr(t.record, side).scales[layout].cpu() for layout in ("compact", "swizzled"))
    assert_bytes_equal(swizzled.flatten(), nvmath.to_block_scale(compact, shape, NVFP4, axis=-1), "scales")


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp8_scales(device, shape, side):
    x = values(*(shape if side == "rowwise" else shape[::-1]), device=device)
    t = zerofp4.quantize_mxfp8(x, columnwise=True)
    compact = getattr(t.record, side).scales["compact"].view(torch.uint8).cpu()
    compact = compact.t().contiguous() if side == "columnwise" else compact
    assert compact.shape == (shape[0], shape[1] // MXFP8_BLOCK)
    swizzled = ops.padded_scale(t.record, side, "swizzled").view(torch.uint8).cpu().flatten()
    assert_bytes_equal(swizzled, nvmath.to_block_scale(compact, shape, MXFP8, axis=-1), "scales")
    places = nvmath_offsets(*compact.shape, shape, MXFP8)
    assert_bytes_equal(swizzled[places], compact, "at nvmath's offsets")


def test_order_of_nibbles(device):
    """Every pair of codes, in values that both hold exactly: a block of 16 that ends with a 6 has scale 1."""
    grid = torch.cat([CODES, -CODES])
    pairs = torch.tensor(list(itertools.product(grid.tolist(), repeat=2)))
    blocks = torch.nn.functional.pad(pairs.view(-1, 14), (0, 2), value=6.0)
    t = zerofp4.quantize(blocks.to(device), block=(1, 16), amax=torch.full((1,), 2688.0, device=device))
    assert (t.rowwise_scale.float() == 1).all()
    theirs = nvmath.quantize_to_fp4(blocks, -1).view(torch.uint8)
    assert_bytes_equal(t.rowwise_data.cpu(), theirs, "codes")
    operand = native.codes(Operand(t), *blocks.shape).cpu()
    assert operand.dtype == nvmath.quantize_to_fp4(blocks, -1).dtype
    assert_bytes_equal(operand.view(torch.uint8), theirs, "as scaled_mm takes them")
