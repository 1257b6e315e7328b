"""zerofp4::quantize: a matrix into given buffers."""

import torch

from zerofp4 import _C
from zerofp4.format import BLOCK, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import ceil_div, check_matrix, packed_shape, scale_shape
from zerofp4.ops.device import DTYPE_CODES, address, target_of
from zerofp4.ops.operator import backend, check_block_rows, check_scale
from zerofp4.ops.stages import HEADER_WORDS, SIDES, TransposeStage, weight_descriptor
from zerofp4.shard import Shard
from zerofp4.storage import BUFFERS, NVFP4Storage, check_buffer

_SCALES = "Tensor({})? {side}_scale, Tensor({})? {side}_scale_expanded, Tensor({})? {side}_scale_swizzled"
torch.library.define(
    "zerofp4::quantize",
    "(Tensor x, int block_rows, Tensor? given_amax, Tensor(a!) amax, Tensor(b!)? rowwise_data, "
    + _SCALES.format("c!", "d!", "e!", side="rowwise")
    + ", Tensor(f!)? columnwise_data, "
    + _SCALES.format("g!", "h!", "i!", side="columnwise")
    + ") -> ()",
)


def _check_quantize(x, block_rows, given_amax, amax, buffers) -> None:
    check_block_rows(block_rows)
    if x.dim() != 2 or x.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"x must be a matrix of one of {WEIGHT_DTYPES}, got {x.dtype} {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    rows, cols = x.shape
    check_matrix(rows, cols, columnwise=buffers["columnwise_data"] is not None)
    for side, m, k in (("rowwise", rows, cols), ("columnwise", cols, rows)):
        has_data = buffers[f"{side}_data"] is not None
        if has_data != (buffers[f"{side}_scale"] is not None):
            raise ValueError(f"{side}_data and {side}_scale must be given together")
        if has_data:
            check_buffer(f"{side}_data", buffers[f"{side}_data"], packed_shape(m, k), torch.uint8, x.device)
        for name, layout in zip(SIDES[side], SCALE_LAYOUTS, strict=True):
            if buffers[name] is not None:
                check_scale(name, buffers[name], scale_shape(m, k, block_rows, layout), x.device)
    for name, value in (("amax", amax), ("given_amax", given_amax)):
        if value is not None:
            check_buffer(name, value, (1,), torch.float32, x.device)


@backend("quantize")
def _quantize(x, block_rows, given_amax, amax, *args) -> None:
    buffers = dict(zip(BUFFERS[:8], args, strict=True))
    _check_quantize(x, block_rows, given_amax, amax, buffers)
    if x.numel() == 0:
        amax.zero_() if given_amax is None else amax.copy_(given_amax)
    elif block_rows == BLOCK:
        _quantize_tiles(x, given_amax, amax, buffers)
    else:
        _quantize_rows(x, given_amax, amax, buffers)


def _single(x, descriptor, reduced: torch.Tensor) -> _C.CastPlan:
    """The stages for one whole tensor; a non-finite one is quantized with amax inf, not skipped."""
    return _C.CastPlan(
        on_cpu=x.device.type == "cpu",
        weights=[descriptor],
        reduced=reduced.data_ptr(),
        reduced_numel=reduced.numel(),
        hash=0.0,
        skip_nonfinite=False,
        found_inf=0,
        status=0,
    )


def _quantize_tiles(x, given_amax, amax, buffers) -> None:
    rows, cols = x.shape
    tiles = ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK)
    reduced = torch.empty(HEADER_WORDS + 1 + tiles, device=x.device)
    codes = buffers["rowwise_data"]
    if codes is None:
        codes = torch.empty(packed_shape(rows, cols), dtype=torch.uint8, device=x.device)
    outputs = {**buffers, "amax": amax}
    shard, dtypes = Shard(0, rows * cols), (x.dtype, x.dtype)
    offsets = (HEADER_WORDS + 1, HEADER_WORDS)
    descriptor = weight_descriptor(outputs, x, shard, x.shape, dtypes, codes.data_ptr(), *offsets, given_amax)
    plan, target = _single(x, descriptor, reduced), target_of(x.device)
    plan.begin(target, False)
    plan.amax(target)
    plan.scale(target)
    plan.cast(target)
    if buffers["columnwise_data"] is not None:
        TransposeStage([(codes, buffers["columnwise_data"])]).run()


def _quantize_rows(x, given_amax, amax, buffers) -> None:
    rows, cols = x.shape
    target = target_of(x.device)
    if given_amax is None:
        amax.zero_()
        descriptor = weight_descriptor({}, x, Shard(0, rows * cols), x.shape, (x.dtype, x.dtype), 0, -1, 0)
        _single(x, descriptor, amax).amax(target)
    else:
        amax.copy_(given_amax)
    names = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")
    outputs = [address(buffers[name]) for name in names]
    _C.quantize_rows(target, x.data_ptr(), DTYPE_CODES[x.dtype], rows, cols, amax.data_ptr(), *outputs)
    for side, m, k in (("rowwise", rows, cols), ("columnwise", cols, rows)):
        compact, *padded = (buffers[name] for name in SIDES[side])
        for layout, buffer in enumerate(padded, start=1):
            if buffer is not None:
                _C.pad_scale(target, compact.data_ptr(), buffer.data_ptr(), m, k, 1, layout)


@torch.library.register_fake("zerofp4::quantize")
def _(x, block_rows, given_amax, amax, *args) -> None:
    _check_quantize(x, block_rows, given_amax, amax, dict(zip(BUFFERS[:8], args, strict=True)))


def quantize_into(x: torch.Tensor, record: NVFP4Storage, given_amax: torch.Tensor | None = None) -> None:
    """Quantize x, a contiguous tensor of the record's shape, into the record's buffers."""
    matrix = x.reshape(record.matrix)
    buffers = [getattr(record, name) for name in BUFFERS[:8]]
    torch.ops.zerofp4.quantize(matrix, record.block[0], given_amax, record.amax, *buffers)
