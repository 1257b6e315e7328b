"""torch.library operators on given tensors (`torch.ops.zerofp4.*`): schemas, fakes and both backends."""

import torch

from zerofp4 import _C
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import ceil_div, check_matrix, packed_shape, scale_shape
from zerofp4.ops.device import DTYPE_CODES, address, target_of
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
torch.library.define(
    "zerofp4::dequantize",
    "(Tensor data, Tensor scale, Tensor amax, int block_rows, ScalarType dtype) -> Tensor",
)
torch.library.define("zerofp4::transpose_packed", "(Tensor data) -> Tensor")
torch.library.define("zerofp4::transpose_packed_into", "(Tensor[] data, Tensor(a!)[] out) -> ()")
_LAYOUT_SCHEMA = "(Tensor scale, int rows, int cols, int block_rows, str layout) -> Tensor"
torch.library.define("zerofp4::pad_scale", _LAYOUT_SCHEMA)
torch.library.define("zerofp4::unpad_scale", _LAYOUT_SCHEMA)


def _backend(name: str):
    """Registers a function as the CPU and the CUDA implementation of an operator."""
    return torch.library.impl(f"zerofp4::{name}", ("cpu", "cuda"))


def _check_block_rows(block_rows: int) -> None:
    if block_rows not in (1, BLOCK):
        raise ValueError(f"block_rows must be 1 or {BLOCK}, got {block_rows}")


def _check_scale(name: str, scale: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """E4M3 scales may also come as their uint8 bytes: much of torch, opcheck included, lacks float8."""
    raw = scale.view(torch.uint8) if scale.dtype == SCALE_DTYPE else scale
    check_buffer(name, raw, shape, torch.uint8, device)


def _check_quantize(x, block_rows, given_amax, amax, buffers) -> None:
    _check_block_rows(block_rows)
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
                _check_scale(name, buffers[name], scale_shape(m, k, block_rows, layout), x.device)
    for name, value in (("amax", amax), ("given_amax", given_amax)):
        if value is not None:
            check_buffer(name, value, (1,), torch.float32, x.device)


@_backend("quantize")
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


def _check_dequantize(data, scale, amax, block_rows, dtype) -> None:
    _check_block_rows(block_rows)
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    rows, half = data.shape
    check_buffer("data", data, (rows, half), torch.uint8, data.device)
    _check_scale("scale", scale, scale_shape(rows, 2 * half, block_rows), data.device)
    check_buffer("amax", amax, (1,), torch.float32, data.device)


@_backend("dequantize")
def _dequantize(data, scale, amax, block_rows, dtype) -> torch.Tensor:
    _check_dequantize(data, scale, amax, block_rows, dtype)
    rows, cols = data.shape[0], 2 * data.shape[1]
    out = torch.empty(rows, cols, dtype=dtype, device=data.device)
    if out.numel():
        inputs = (data.data_ptr(), scale.data_ptr(), amax.data_ptr())
        _C.dequantize(
            target_of(data.device), *inputs, rows, cols, block_rows, DTYPE_CODES[dtype], out.data_ptr()
        )
    return out


@torch.library.register_fake("zerofp4::dequantize")
def _(data, scale, amax, block_rows, dtype) -> torch.Tensor:
    _check_dequantize(data, scale, amax, block_rows, dtype)
    return data.new_empty((data.shape[0], 2 * data.shape[1]), dtype=dtype)


def _new_transpose(data) -> torch.Tensor:
    if data.dim() != 2 or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError(f"data must be a contiguous uint8 matrix, got {data.dtype} {tuple(data.shape)}")
    check_matrix(data.shape[0], 2 * data.shape[1], columnwise=True)
    return data.new_empty((2 * data.shape[1], data.shape[0] // 2))


@_backend("transpose_packed")
def _transpose_packed(data) -> torch.Tensor:
    out = _new_transpose(data)
    TransposeStage([(data, out)]).run()
    return out


torch.library.register_fake("zerofp4::transpose_packed", _new_transpose)


def _check_transposes(data, out) -> None:
    if len(data) != len(out):
        raise ValueError(f"data and out must have the same length, got {len(data)} and {len(out)}")
    for i, (source, target) in enumerate(zip(data, out, strict=True)):
        rows, cols = source.shape[0], 2 * source.shape[1]
        check_matrix(rows, cols, columnwise=True)
        check_buffer(f"data[{i}]", source, packed_shape(rows, cols), torch.uint8, data[0].device)
        check_buffer(f"out[{i}]", target, packed_shape(cols, rows), torch.uint8, data[0].device)


@_backend("transpose_packed_into")
def _transpose_packed_into(data, out) -> None:
    _check_transposes(data, out)
    TransposeStage(list(zip(data, out, strict=True))).run()


@torch.library.register_fake("zerofp4::transpose_packed_into")
def _(data, out) -> None:
    _check_transposes(data, out)


def _new_scale(scale, rows, cols, block_rows, layout, *, source: str, result: str) -> torch.Tensor:
    _check_block_rows(block_rows)
    if layout not in SCALE_LAYOUTS[1:]:
        raise ValueError(f"layout must be one of {SCALE_LAYOUTS[1:]}, got {layout!r}")
    _check_scale("scale", scale, scale_shape(rows, cols, block_rows, source), scale.device)
    return scale.new_empty(scale_shape(rows, cols, block_rows, result))


def _new_padded(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    return _new_scale(scale, rows, cols, block_rows, layout, source="compact", result=layout)


def _new_compact(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    return _new_scale(scale, rows, cols, block_rows, layout, source=layout, result="compact")


@_backend("pad_scale")
def _pad_scale(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    out = _new_padded(scale, rows, cols, block_rows, layout)
    if out.numel():
        arguments = (rows, cols, block_rows, SCALE_LAYOUTS.index(layout))
        _C.pad_scale(target_of(scale.device), scale.data_ptr(), out.data_ptr(), *arguments)
    return out


@_backend("unpad_scale")
def _unpad_scale(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    out = _new_compact(scale, rows, cols, block_rows, layout)
    if out.numel():
        arguments = (rows, cols, block_rows, SCALE_LAYOUTS.index(layout))
        _C.unpad_scale(target_of(scale.device), scale.data_ptr(), out.data_ptr(), *arguments)
    return out


torch.library.register_fake("zerofp4::pad_scale", _new_padded)
torch.library.register_fake("zerofp4::unpad_scale", _new_compact)
