"""The native extension behind torch.library operators and plan stages: the only Python that imports
zerofp4._C.

Operators on given tensors (`torch.ops.zerofp4.*`) have fakes and work under torch.compile. The stages of a
plan are not operators, because a schema cannot declare writes through a table of addresses.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4 import _C
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.layout import ceil_div, check_matrix, packed_shape, scale_shape
from zerofp4.shard import Shard
from zerofp4.storage import BUFFERS, NVFP4Storage, check_buffer

HEADER_WORDS: int = _C.HEADER_WORDS
ERROR_WORD: int = _C.ERROR_WORD
HASH_WORD: int = _C.HASH_WORD
PEER_ERROR: int = _C.PEER_ERROR
PLAN_MISMATCH: int = _C.PLAN_MISMATCH
OLDEST_CAPABILITY = (8, 0)

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIDES = {
    side: (f"{side}_scale", f"{side}_scale_expanded", f"{side}_scale_swizzled")
    for side in ("rowwise", "columnwise")
}


# Where a call runs


@functools.cache
def check_cuda(index: int) -> None:
    """Raises RuntimeError unless this build and this GPU can run the CUDA kernels."""
    if "cuda_version" not in _C.build():
        raise RuntimeError(
            f"a tensor is on cuda:{index}, but zerofp4 was built without CUDA: "
            "reinstall it where nvcc is on the PATH"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST_CAPABILITY:
        raise RuntimeError(
            f"zerofp4 needs compute capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer, "
            f"cuda:{index} ({torch.cuda.get_device_name(index)}) has {capability[0]}.{capability[1]}"
        )


def _target(device: torch.device) -> _C.Target:
    """The current stream of a GPU, or torch's number of threads."""
    if device.type == "cpu":
        return _C.Target(-1, 0, torch.get_num_threads())
    if device.type != "cuda":
        raise RuntimeError(f"zerofp4 runs on CPU and CUDA tensors, not on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    check_cuda(index)
    return _C.Target(index, torch.cuda.current_stream(index).cuda_stream, 0)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# Stages of a plan


class CastItem(NamedTuple):
    """One weight of a cast: its record, what this rank owns of it, and where its amaxes lie in the reduced
    vector.
    """

    record: NVFP4Storage
    master: torch.Tensor | None
    shard: Shard
    codes: torch.Tensor | None
    """uint8 bytes shard.byte_range of the packed weight; None where the rank owns nothing."""
    tile_offset: int
    amax_offset: int


def _descriptor(
    buffers: dict,
    master,
    shard: Shard,
    shape,
    dtypes,
    codes: int,
    tile_offset: int,
    amax_offset: int,
    given_amax=None,
) -> _C.WeightDescriptor:
    return _C.WeightDescriptor(
        master=_address(master),
        start=shard.start,
        numel=shard.numel,
        rows=shape[0],
        cols=shape[1],
        master_dtype=_DTYPE_CODES[dtypes[0]],
        weight_dtype=_DTYPE_CODES[dtypes[1]],
        codes=codes,
        amax=_address(buffers.get("amax")),
        columnwise_amax=_address(buffers.get("columnwise_amax")),
        given_amax=_address(given_amax),
        rowwise_scale=[_address(buffers.get(name)) for name in _SIDES["rowwise"]],
        columnwise_scale=[_address(buffers.get(name)) for name in _SIDES["columnwise"]],
        tile_offset=tile_offset,
        amax_offset=amax_offset,
    )


def _upload(plan, device: torch.device, count: int) -> torch.Tensor | None:
    """Copies a plan's descriptors to the GPU; the returned tensor must live as long as the plan."""
    if device.type == "cpu" or count < 2:
        return None
    table = torch.frombuffer(bytearray(plan.descriptor_bytes()), dtype=torch.uint8).to(device)
    plan.set_device_descriptors(table.data_ptr())
    return table


class CastStages:
    """begin, amax, scale and cast of a list of weights on one device, each a single launch, on the current
    stream.

    reduced: float32 vector of HEADER_WORDS words, then whatever the items' offsets point to; a MAX all-reduce
    of it belongs between amax and scale.
    hash: an integer below 2**24 that tells plans apart.
    found_inf: float32 [1].
    status: int32 [1] on the CPU (pinned for a GPU), set to PEER_ERROR or PLAN_MISMATCH by `scale` and never
    cleared.

    Holds addresses: the items' tensors must stay where they are, and whoever built it keeps them alive.
    """

    def __init__(
        self,
        items: Sequence[CastItem],
        reduced: torch.Tensor,
        *,
        hash: int = 0,
        skip_nonfinite: bool = True,
        found_inf: torch.Tensor | None = None,
        status: torch.Tensor | None = None,
    ):
        self.device = reduced.device
        weights = []
        for item in items:
            dtypes = (torch.float32 if item.master is None else item.master.dtype, item.record.dtype)
            buffers, matrix = dict(item.record.buffers()), item.record.matrix
            codes = _address(item.codes)
            offsets = (item.tile_offset, item.amax_offset)
            weights.append(_descriptor(buffers, item.master, item.shard, matrix, dtypes, codes, *offsets))
        self._plan = _C.CastPlan(
            on_cpu=self.device.type == "cpu",
            weights=weights,
            reduced=reduced.data_ptr(),
            reduced_numel=reduced.numel(),
            hash=float(hash),
            skip_nonfinite=skip_nonfinite,
            found_inf=_address(found_inf),
            status=_address(status),
        )
        self._table = _upload(self._plan, self.device, len(weights))

    def begin(self, error: bool = False) -> None:
        """Clear the vector and write its header; with `error`, a flag that keeps every rank from writing."""
        self._plan.begin(_target(self.device), error)

    def amax(self) -> None:
        """Tile amaxes and group amaxes of the owned elements, by maximum with what the vector holds."""
        self._plan.amax(_target(self.device))

    def scale(self) -> None:
        """Every scale buffer and amax of every weight, from the reduced vector."""
        self._plan.scale(_target(self.device))

    def cast(self) -> None:
        """Codes of the owned elements."""
        self._plan.cast(_target(self.device))


class TransposeStage:
    """Packed transposes of a list of (rowwise_data, columnwise_data) pairs in one launch, on the current
    stream.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        pairs = [(data, out) for data, out in pairs if data.numel()]
        self.device = pairs[0][0].device if pairs else torch.device("cpu")
        items = [
            _C.TransposeDescriptor(_address(data), _address(out), data.shape[0], 2 * data.shape[1])
            for data, out in pairs
        ]
        self._plan = _C.TransposePlan(self.device.type == "cpu", items) if items else None
        self._table = _upload(self._plan, self.device, len(items)) if items else None

    def run(self) -> None:
        if self._plan is not None:
            self._plan.run(_target(self.device))


# Operators on given tensors

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
        for name, layout in zip(_SIDES[side], SCALE_LAYOUTS, strict=True):
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
    descriptor = _descriptor(outputs, x, shard, x.shape, dtypes, codes.data_ptr(), *offsets, given_amax)
    plan, target = _single(x, descriptor, reduced), _target(x.device)
    plan.begin(target, False)
    plan.amax(target)
    plan.scale(target)
    plan.cast(target)
    if buffers["columnwise_data"] is not None:
        TransposeStage([(codes, buffers["columnwise_data"])]).run()


def _quantize_rows(x, given_amax, amax, buffers) -> None:
    rows, cols = x.shape
    target = _target(x.device)
    if given_amax is None:
        amax.zero_()
        descriptor = _descriptor({}, x, Shard(0, rows * cols), x.shape, (x.dtype, x.dtype), 0, -1, 0)
        _single(x, descriptor, amax).amax(target)
    else:
        amax.copy_(given_amax)
    names = ("rowwise_data", "rowwise_scale", "columnwise_data", "columnwise_scale")
    outputs = [_address(buffers[name]) for name in names]
    _C.quantize_rows(target, x.data_ptr(), _DTYPE_CODES[x.dtype], rows, cols, amax.data_ptr(), *outputs)
    for side, m, k in (("rowwise", rows, cols), ("columnwise", cols, rows)):
        compact, *padded = (buffers[name] for name in _SIDES[side])
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
            _target(data.device), *inputs, rows, cols, block_rows, _DTYPE_CODES[dtype], out.data_ptr()
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
        _C.pad_scale(_target(scale.device), scale.data_ptr(), out.data_ptr(), *arguments)
    return out


@_backend("unpad_scale")
def _unpad_scale(scale, rows, cols, block_rows, layout) -> torch.Tensor:
    out = _new_compact(scale, rows, cols, block_rows, layout)
    if out.numel():
        arguments = (rows, cols, block_rows, SCALE_LAYOUTS.index(layout))
        _C.unpad_scale(_target(scale.device), scale.data_ptr(), out.data_ptr(), *arguments)
    return out


torch.library.register_fake("zerofp4::pad_scale", _new_padded)
torch.library.register_fake("zerofp4::unpad_scale", _new_compact)


# What this build is


def build_info() -> dict:
    """What was compiled in and what this machine can run.

    {"cpu": {"compiled": [instruction sets], "running": the one in use},
     "cuda": {"compiled": bool, "version": of the toolkit, "architectures": [...],
              "devices": [{"name", "capability", "usable"}]}}
    """
    build = _C.build()
    devices = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        usable = "cuda_version" in build and capability >= OLDEST_CAPABILITY
        devices.append(
            {"name": torch.cuda.get_device_name(index), "capability": capability, "usable": usable}
        )
    return {
        "cpu": {"compiled": build["isas"].split(), "running": _C.cpu_isa()},
        "cuda": {
            "compiled": "cuda_version" in build,
            "version": build.get("cuda_version"),
            "architectures": build.get("cuda_architectures", "").split(),
            "devices": devices,
        },
    }
