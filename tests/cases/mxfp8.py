"""What tests of MXFP8 share: shapes, bytes to decode, what buffers should hold, tensors."""

import math

import pytest
import torch
from helpers import assert_bytes_equal
from tensor_helpers import make as make_nvfp4
from tensor_helpers import values

import zerofp4
from cases.ops import POISON
from zerofp4 import reference
from zerofp4.format import MXFP8_SCALE_LAYOUTS
from zerofp4.storage import side_names

NAMES = side_names(MXFP8_SCALE_LAYOUTS)
ALL = {"columnwise": True, "scale_layouts": ["swizzled"]}

# Cut blocks, vectors and warps of every kind, and several swizzle atoms.
SHAPES = [
    (1, 1),
    (1, 32),
    (3, 31),
    (31, 33),
    (32, 32),
    (33, 64),
    (7, 257),
    (40, 264),
    (65, 130),
    (64, 512),
    (128, 128),
    (129, 513),
    (300, 36),
]


def expected_buffers(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every buffer should hold, as bytes."""
    q = reference.quantize_mxfp8(x.cpu())
    expected = q._asdict()
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        swizzled = reference.swizzle_mxfp8_scale(expected[f"{side}_scale"], *x.shape, columnwise)
        expected[f"{side}_scale_swizzled"] = swizzled
    return {name: expected[name].view(torch.uint8) for name in NAMES}


def at_an_offset(shape, device, offset: int) -> torch.Tensor:
    """Poisoned bytes, so many from where they would be aligned."""
    size = offset + math.prod(shape)
    return torch.full((size,), POISON, dtype=torch.uint8, device=device)[offset:].view(shape)


def swizzled_bytes(scale: torch.Tensor, shape, columnwise: bool) -> torch.Tensor:
    """Compact scale bytes swizzled, with 0xFF as padding."""
    swizzled = reference.swizzle_mxfp8_scale(scale, *shape, columnwise)
    exists = reference.swizzle_mxfp8_scale(torch.ones_like(scale), *shape, columnwise)
    return torch.where(exists == 1, swizzled, 0xFF)


def make(device="cpu", shape=(48, 80), **options):
    return zerofp4.quantize_mxfp8(values(*shape, device=device), **{**ALL, **options})


def assert_quantized(tensor, x):
    """Every buffer of the tensor is what the specification says for the matrix x."""
    expected = expected_buffers(x)
    for name, buffer in tensor.record.buffers():
        assert_bytes_equal(buffer.view(torch.uint8), expected[name], name)


FORMATS = {"nvfp4": make_nvfp4, "mxfp8": make}
formats = pytest.mark.parametrize("make_format", FORMATS.values(), ids=FORMATS)
"""Of tests of what both kinds of tensors do."""
