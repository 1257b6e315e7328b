"""NVFP4Tensors to test with, and whether every buffer of one is what it should be."""

import torch
from cases.ops import assert_record_equals
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import FourOverSix, reference
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.storage import BUFFERS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = {"rowwise": True, "columnwise": True, "scale_layouts": SCALE_LAYOUTS}
FORMATS = {
    "1d": {"block": (1, 16)},
    "2d": {},
    "hadamard": {"block": (1, 16), "hadamard": True},
    "hadamard, no signs": {"block": (1, 16), "hadamard": True, "random_signs": False},
    "hadamard, four over six": {"block": (1, 16), "hadamard": True, "four_over_six": FourOverSix()},
    "four over six": {"four_over_six": FourOverSix(256, "mse")},
    "four over six, 448": {"block": (1, 16), "four_over_six": FourOverSix(448, "mae")},
}

"""Options of quantize() that make tensors of another kind."""


def values(*shape, device="cpu", dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def make(device, shape=(48, 80), **options):
    return zerofp4.quantize(values(*shape, device=device), **{**ALL, **options})


def assert_record_equal(actual, expected, names=BUFFERS):
    for name in names:
        mine, other = actual.record.buffer(name), expected.record.buffer(name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert_bytes_equal(mine, other, name)


def assert_quantized(tensor, x, block_rows=16, amax=None):
    """Every buffer of the tensor is what the specification says for the matrix x."""
    assert_record_equals(tensor.record, reference.quantize(x, block_rows, amax), "quantized")


def addresses(tensor):
    return {name: buffer.data_ptr() for name, buffer in tensor.record.buffers()}


def e4m3_max(options) -> int:
    return options["four_over_six"].e4m3_max if "four_over_six" in options else 448


def same_format(t, other) -> bool:
    fields = ("block", "hadamard", "random_signs", "four_over_six", "shape", "dtype")
    return all(getattr(t, field) == getattr(other, field) for field in fields)


def specified(x, block=(16, 16), **options) -> reference.Quantized:
    if block == (16, 16) and x.dim() == 3:
        return reference.quantize_experts(x, **options)
    return reference.quantize(x.reshape(-1, x.shape[-1]), block[0], **options)


def assert_specified(t, x, **options):
    q = specified(x, **options)
    columnwise_only = t.rowwise_data is None
    for name in ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale"):
        if getattr(t, name) is not None:
            assert_bytes_equal(getattr(t, name), getattr(q, name), name)
    assert_bytes_equal(t.amax, q.columnwise_amax if columnwise_only else q.amax, "amax")
    if t.columnwise_amax is not None:
        assert_bytes_equal(t.columnwise_amax, q.columnwise_amax, "columnwise_amax")


def strided(x):
    wide = torch.full((x.shape[0], 2 * x.shape[1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, 3::2] = x
    return wide[:, 3::2]


VIEWS = {
    "transpose": lambda x: x.t().contiguous().t(),
    "strided": strided,
    "expanded": lambda x: x[:1].expand(x.shape),
    "of three dimensions": lambda x: x.view(2, 17, 80).transpose(0, 1),
    "rows of a wider matrix": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]],
}
