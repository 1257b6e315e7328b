"""dequantize_mxfp8 on every backend against the specification, byte for byte."""

import pytest
import torch
from cases.mxfp8 import SHAPES, at_an_offset, swizzled_bytes
from cases.ops import DTYPES, marked, random_bytes
from helpers import assert_values_equal, poisoned_allocations

from zerofp4 import reference
from zerofp4.format import MXFP8_DATA_DTYPE, MXFP8_SCALE_DTYPE
from zerofp4.layout import mxfp8_scale_shape

ZEROFP4 = torch.ops.zerofp4
LAYOUTS = ("compact", "swizzled")
EMPTY = [(0, 32), (32, 0), (0, 0)]


def check_dequantize(data, scale, columnwise: bool, dtype, device, offset: int = 0) -> None:
    """data and scale: bytes on the CPU."""
    formats = data.view(MXFP8_DATA_DTYPE), scale.view(MXFP8_SCALE_DTYPE)
    expected = reference.dequantize_mxfp8(*formats, columnwise, dtype)
    stored = at_an_offset(data.shape, device, offset).copy_(data)
    layouts = {"compact": scale, "swizzled": swizzled_bytes(scale, data.shape, columnwise)}
    for layout, scales in layouts.items():
        with poisoned_allocations():
            actual = ZEROFP4.dequantize_mxfp8(stored, scales.to(device), columnwise, layout, dtype)
        assert_values_equal(actual.cpu(), expected, f"{tuple(data.shape)} {dtype} {layout}")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize_every_byte_and_scale(device, columnwise, dtype):
    every = torch.arange(256, dtype=torch.uint8)
    data, scale = every.repeat(256, 1), every.repeat(8, 1).t().contiguous()
    if columnwise:
        data, scale = data.t().contiguous(), scale.t().contiguous()
    check_dequantize(data, scale, columnwise, dtype, device)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", marked("threads", SHAPES, (129, 513)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize_every_shape_and_dtype(device, shape, dtype, columnwise):
    scale = random_bytes(mxfp8_scale_shape(*shape, columnwise), 1)
    for offset in (0, 1):
        check_dequantize(random_bytes(shape, 0), scale, columnwise, dtype, device, offset)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("columnwise", [False, True])
def test_empty(device, shape, columnwise):
    data = torch.empty(shape, dtype=torch.uint8, device=device)
    for layout in LAYOUTS:
        scale = torch.empty(mxfp8_scale_shape(*shape, columnwise, layout), dtype=torch.uint8, device=device)
        assert ZEROFP4.dequantize_mxfp8(data, scale, columnwise, layout, torch.float16).shape == shape


# The operators in torch.library


@pytest.mark.heavy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(device, layout):
    # As bytes: opcheck compares arguments with operations that float8 does not have. Without a NaN, which it
    # takes for different from itself.
    for columnwise, shape in ((False, (33, 100)), (True, (64, 40)), (False, (0, 32))):
        data = random_bytes(shape, 0) & 0xBF
        scale = random_bytes(mxfp8_scale_shape(*shape, columnwise), 1) & 0x7F
        scale = swizzled_bytes(scale, shape, columnwise) if layout == "swizzled" else scale
        call = (data.to(device), scale.to(device), columnwise, layout, torch.bfloat16)
        torch.library.opcheck(ZEROFP4.dequantize_mxfp8.default, call)
