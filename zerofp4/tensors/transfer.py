"""How a quantized tensor leaves its place: copies, pickles, pinned memory, collectives."""

import types
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from zerofp4.storage import Storage, record_of
from zerofp4.tensors.initial_value import BEGINS_WITH_CODES, HAD_MASTER, INIT_VAL, initial_value


def copy_record(record: Storage, function: Callable[[torch.Tensor], torch.Tensor]) -> Storage:
    """A record of function(buffer), with the same initial value and marks."""
    record.check_memory("the tensor")
    new = record.map(function)
    for mark in (HAD_MASTER, BEGINS_WITH_CODES):
        if mark in record.attachments:
            new.attachments[mark] = True
    if INIT_VAL in record.attachments:
        new.attachments[INIT_VAL] = record.attachments[INIT_VAL].clone()
    return new


# Pickles


def reduce_tensor(tensor) -> tuple:
    record = tensor.record
    record.check_memory("the tensor")
    buffers = dict(record.buffers())
    for name, buffer in buffers.items():
        if buffer.untyped_storage().nbytes() > buffer.nbytes:  # a view of a flat buffer
            buffer = buffer.clone()
        if buffer.dtype.is_floating_point and buffer.itemsize == 1:
            buffer = buffer.view(torch.uint8)  # plain pickle writes float8 and cannot read it
        buffers[name] = buffer
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    state = (tuple(record.shape), record.context(), buffers, record.name, tensor.requires_grad, is_parameter)
    # Not in state dicts, whose files would be several times as large.
    value = initial_value(record) if is_parameter else None
    return _rebuild_tensor, (type(tensor), *state, *(() if value is None else (value,)))


def _rebuild_tensor(cls, shape, context, buffers, name, requires_grad, is_parameter, value=None):
    dtype_of = cls._record_type.buffer_dtype
    buffers = {key: buffer.view(dtype_of(key)) for key, buffer in buffers.items()}
    tensor = cls.__tensor_unflatten__(buffers, context, shape, None)
    tensor.record.name = name
    if value is not None:
        tensor.record.attachments[INIT_VAL] = value
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild_tensor])


# Memory


def refuse_safetensors(tensor, frame: types.FrameType) -> None:
    """Raises TypeError, with ways out, if safetensors, or accelerate for it, asks for the storage."""
    if not frame.f_globals.get("__name__", "").startswith(("safetensors", "accelerate")):
        return
    name = f" {tensor.record.name!r}" if tensor.record.name else ""
    raise TypeError(
        f"safetensors cannot hold the {type(tensor).__name__}{name} of shape {tuple(tensor.shape)}: give it "
        "dict(zerofp4.master_state_dict(model, optimizer)), call zerofp4.save_safetensors, or have "
        "zerofp4.register_plain_state_dict(model) make state_dict() hold values"
    )


def new_empty(tensor, size, *, dtype=None, layout=None, device=None, pin_memory=None):
    """With a device, and the same size and dtype, a tensor of the same format; else a plain tensor."""
    same = tuple(size) == tuple(tensor.shape) and dtype in (None, tensor.dtype)
    options = {"device": device or tensor.device, "pin_memory": bool(pin_memory)}
    if device is None or not same:
        return torch.empty(size, dtype=dtype or tensor.dtype, layout=layout, **options)
    return type(tensor)(tensor.record.map(lambda buffer: torch.empty_like(buffer, **options)))


def empty_like(tensor, *, memory_format=None, **options):
    return new_empty(tensor, tensor.shape, **options)


def record_stream(tensor, stream) -> None:
    for _, buffer in tensor.record.buffers():
        buffer.record_stream(stream)


def is_pinned(tensor, device=None) -> bool:
    return all(buffer.is_pinned() for _, buffer in tensor.record.buffers())


def pin_memory(tensor, device=None):
    return type(tensor)(copy_record(tensor.record, torch.Tensor.pin_memory))


# Collectives. Their schemas declare no writes, so a result would go to a dequantized copy, unseen.


def collective(func, args: tuple, kwargs: dict) -> tuple | None:
    """A c10d operator that writes to a quantized tensor: broadcast, or RuntimeError. None for any other."""
    kinds = [type(leaf).__name__ for leaf in tree_leaves(args[0]) if record_of(leaf) is not None]
    if func._opname == "send" or not kinds:
        return None
    if func is torch.ops.c10d.broadcast_.default:
        return _broadcast(func, *args, **kwargs)
    name = func._opname.strip("_")
    raise RuntimeError(
        f"the collective {name} would write to an {kinds[0]}, which only broadcast may: let it write to a "
        "plain tensor and copy_ that, which requantizes"
    )


def _broadcast(func, tensors, group, root, root_tensor=0, async_op=True, timeout=-1) -> tuple:
    """Send the root's buffers to the other ranks, whose formats must be the same."""
    records, unboxed = [record_of(tensor) for tensor in tensors], dist.ProcessGroup.unbox(group)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, root_tensor, False
    if timeout >= 0:
        options.timeout = timedelta(milliseconds=timeout)
    buffers: list[torch.Tensor] = []
    for record, tensor in zip(records, tensors, strict=True):
        if record is None:
            buffers.append(tensor)
        else:
            buffers += [buffer.view(torch.uint8) for _, buffer in record.buffers()]  # gloo has no float8
            record.attachments.pop(HAD_MASTER, None)
            torch.autograd.graph.increment_version(tensor)
    for buffer in buffers[:-1]:
        # Not by func: with NCCL it gives no work, and waiting for that crashes.
        work = unboxed.broadcast([buffer], options)
        if work is not None:
            work.wait()
    return tensors, func(buffers[-1:], group, root, root_tensor, async_op, timeout)[1]
