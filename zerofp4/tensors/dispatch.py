"""What torch's operators do with quantized tensors: handlers of __torch_dispatch__, below autograd."""

import sys

import torch
from torch.utils._pytree import tree_leaves, tree_map

from zerofp4 import ops
from zerofp4.storage import Storage, check_memory, record_of
from zerofp4.tensors import transfer
from zerofp4.tensors.initial_value import is_kept_by, replace_initial_value, take_initial_value

_REFUSED = {
    "torch.distributed.fsdp": "FSDP cannot shard quantized weights ({}): it would train dequantized copies "
    "of them: call zerofp4.integrations.fsdp2.prepare(model) in place of convert_model and before "
    "fully_shard, or let ZeroFP4Optimizer shard the masters",
    "torch.distributed.tensor": "DTensor and tensor parallelism are not supported for quantized weights "
    "({}): they would hold dequantized copies of them",
    "torch.distributed._shard": "torch.distributed.checkpoint cannot read a weight that was saved in pieces "
    "into a quantized one ({}): load the model before convert_model, or call "
    "zerofp4.register_plain_state_dict(model) first",
    "transformers.modeling_utils": "resize_token_embeddings would make an ordinary head of a quantized one "
    "({}): call it before convert_model",
}
"""Errors for modules that would silently continue with dequantized copies."""

ADAPTERS = (
    "With peft, call zerofp4.unconvert_model(model) before adapters are merged, and make adapters that begin "
    "with a change of base weights (PiSSA, OLoRA) before convert_model"
)

_AVERAGES = "torch.optim.swa_utils"
"""AveragedModel copies averages into a copy of the model, which would requantize them each time."""

_BETWEEN = ("zerofp4.tensors.", "torch._", "torch.utils.", "torch.distributed.distributed_c10d")
_BETWEEN += ("torch.distributed.c10d_logger",)
"""Modules whose frames lie between an operator and its caller."""


def dispatch(func, args: tuple, kwargs: dict):
    """Run an operator on a quantized tensor, by its handler or on dequantized copies. Raises RuntimeError if
    it would write to those, NotImplementedError if FSDP or DTensor would train them.
    """
    handler = HANDLERS.get(func)
    if handler is not None:
        return handler(*args, **kwargs)
    _refuse_copies(func)
    if func.namespace == "c10d":
        result = transfer.collective(func, args, kwargs)
        if result is not None:
            return result
    _refuse_writes(func, args, kwargs)
    args, kwargs = tree_map(lambda leaf: leaf if record_of(leaf) is None else plain(leaf), (args, kwargs))
    return func(*args, **kwargs)


def _refuse_writes(func, args: tuple, kwargs: dict) -> None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[index] if index < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(written):
                if record_of(leaf) is not None:
                    raise RuntimeError(f"{func}" + writes(leaf))


def writes(tensor) -> str:
    return (
        f" writes to an {type(tensor).__name__}, which only copy_, zero_ and fill_ may do: compute the new "
        "values in a plain tensor and copy_ that, which requantizes. Initialize a model before "
        "zerofp4.convert_model. To train, use zerofp4.optim.ZeroFP4Optimizer, which updates FP32 masters; "
        f"for averages of weights, use zerofp4.optim.AveragedMasters. {ADAPTERS}"
    )


def _refuse_copies(func) -> None:
    """Raise NotImplementedError if the caller, by its frame, would make parameters of values."""
    module = _who_asks()
    for name, message in _REFUSED.items():
        if module.startswith(name):
            raise NotImplementedError(message.format(func))


def _who_asks() -> str:
    """The name of the module that called torch."""
    if torch.compiler.is_compiling():
        return ""
    frame = sys._getframe(1)
    while frame is not None and _module(frame).startswith(_BETWEEN):
        frame = frame.f_back
    return "" if frame is None else _module(frame)


def _module(frame) -> str:
    return frame.f_globals.get("__name__", "")


# Handlers


def plain(tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor._values_of(tensor.record, dtype or tensor.dtype)


def _share(tensor):
    with torch.inference_mode(tensor.is_inference()):  # an alias is of the same kind
        return type(tensor)(tensor.record)


def _detach(tensor):
    """distribute_tensor begins with it. (FSDP detaches a tensor only to look at it.)"""
    if _who_asks().startswith("torch.distributed.tensor"):
        _refuse_copies(_aten.detach.default)
    return _share(tensor)


def _as_strided(tensor, size, stride, storage_offset=None):
    """FSDP2 takes the whole tensor with it, unchanged."""
    if (tuple(size), tuple(stride), storage_offset or 0) == (tuple(tensor.shape), tensor.stride(), 0):
        return _share(tensor)
    _refuse_copies(_aten.as_strided.default)
    return plain(tensor).as_strided(size, stride, storage_offset)


def _clone(tensor, *, memory_format=None):
    tensor.record.check_memory("the tensor")
    return type(tensor)(tensor.record.map(torch.clone))


def _to_copy(tensor, *, dtype=None, device=None, non_blocking=False, pin_memory=None, **layout):
    """Another dtype dequantizes, another device does not."""
    if dtype is not None and dtype != tensor.dtype:
        return plain(tensor).to(dtype=dtype, device=device, non_blocking=non_blocking)
    options = {"device": device or tensor.device, "non_blocking": non_blocking, "copy": True}
    return type(tensor)(transfer.copy_record(tensor.record, lambda buffer: buffer.to(**options)))


def _copy_(target, source, non_blocking=False):
    mine, other = record_of(target), record_of(source)
    if mine is not None and _who_asks() == _AVERAGES:
        raise RuntimeError("AveragedModel" + writes(target))
    if mine is None:
        if _who_asks().startswith("transformers.modeling_utils"):
            _refuse_copies(_aten.copy_.default)
        return target.copy_(plain(source), non_blocking)
    mine.check_memory("the tensor")
    if other is not None:
        other.check_memory("the source of copy_")
    if other is not None and other.scheme == mine.scheme:
        _copy_bytes(target, other, non_blocking)
        if mine is not other:
            take_initial_value(mine, other)
        return target
    check_memory("the source of copy_", source)
    values = source.resolve_neg() if other is None else plain(source)
    if is_kept_by(mine, values, lambda: plain(target)):
        return target
    return _write(target, values)


def _copy_bytes(target, source: Storage, non_blocking: bool) -> None:
    """Copy all buffers from a record of the same scheme, deriving those it lacks. Nothing is requantized."""
    record = target.record
    found = [(name, side, ops.derived_side(source, name)) for name, side in record.sides()]
    for name, side, given in found:
        if side.amax is not None and (side is found[0][1] or side.amax is not record.amax):
            side.amax.copy_(given.amax, non_blocking)  # once, if two sides share it
        side.data.copy_(given.data, non_blocking)
        like_source = record.from_context(record.shape, record.context())
        setattr(like_source, name, given)
        for layout, buffer in side.scales.items():
            scale = given.scales["compact"]
            if layout != "compact":
                scale = ops.padded_scale(like_source, name, layout)
            buffer.copy_(scale, non_blocking)


def _write(tensor, values: torch.Tensor):
    """Quantize values into the tensor's buffers, broadcast to its shape and rounded to its dtype."""
    record = tensor.record
    rounded = values.to(device=record.device, dtype=record.dtype)
    tensor._quantize_into(rounded.expand(record.shape).contiguous(), record)
    replace_initial_value(record, values)
    return tensor


def _fill_(tensor, value):
    tensor.record.check_memory("the tensor")
    return _write(tensor, torch.as_tensor(value, dtype=torch.float32))


def _zero_(tensor):
    tensor.record.check_memory("the tensor")
    tensor.record.zero()
    replace_initial_value(tensor.record, torch.zeros((), dtype=torch.float32, device="cpu"))
    return tensor


def _count_of_experts(tensor, dim: int) -> int:
    """The number of matrices along a dimension, or 0 if a stack does not extend along it."""
    return getattr(tensor.record, "experts", None) or 0 if dim in (0, -3) else 0


def _experts(tensor, only: int | None = None) -> list:
    """The matrices of a stack, or only one of them, over the same buffers."""
    with torch.inference_mode(tensor.is_inference()):  # as in _share
        return [type(tensor)(record) for record in tensor.record.matrices(only)]


def _select(tensor, dim, index):
    count = _count_of_experts(tensor, dim)
    if not -count <= index < count:
        return _aten.select.int(plain(tensor), dim, index)
    return _experts(tensor, index % count)[0]


def _unbind(tensor, dim=0):
    if not _count_of_experts(tensor, dim):
        return _aten.unbind.int(plain(tensor), dim)
    return _experts(tensor)


_aten = torch.ops.aten
HANDLERS = {
    _aten.alias.default: _share,
    _aten.as_strided.default: _as_strided,
    _aten.clone.default: _clone,
    _aten.copy_.default: _copy_,
    _aten.dequantize.self: plain,
    _aten.detach.default: _detach,
    _aten.empty_like.default: transfer.empty_like,
    _aten.fill_.Scalar: _fill_,
    _aten.fill_.Tensor: _fill_,
    _aten.is_pinned.default: transfer.is_pinned,
    _aten.new_empty.default: transfer.new_empty,
    _aten._pin_memory.default: transfer.pin_memory,
    _aten.record_stream.default: transfer.record_stream,
    _aten._to_copy.default: _to_copy,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.zero_.default: _zero_,
    torch.ops.prims.convert_element_type.default: plain,
}
# autograd decomposes these into _to_copy, but not in inference mode.
for _whole in (_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten.to.other, _aten.type_as.default):
    HANDLERS[_whole] = _whole.decompose
"""Other operators get dequantized copies. Higher layers add handlers of their own."""
