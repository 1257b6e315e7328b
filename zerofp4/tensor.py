"""NVFP4Tensor, a torch.Tensor over a storage record; quantize and empty make one."""

import copy
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from zerofp4 import ops, tensor_ops
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES
from zerofp4.storage import NVFP4Storage, allocate, check_buffer, check_layouts, note_rebinding
from zerofp4.tensor_ops import INIT_VAL, SIDES, scale_name

_WRITES = (
    " writes to an NVFP4Tensor, which only copy_, zero_ and fill_ may do: "
    "compute the new values in a plain tensor and copy_ that, which requantizes"
)


class NVFP4Tensor(torch.Tensor):
    """A torch.Tensor of a logical shape and dtype whose bytes, quantized, are in a storage record.

    - Operations that are not named here dequantize and give plain tensors; gradients flow through them. So
      do `.to(dtype)`, with the values of `dequantize(dtype)`, and views: a view is one of a dequantized copy,
      and writing to it does not change the codes.
    - F.linear, matmul, mm and @ save the quantized tensor for backward and dequantize it again there.
    - clone, deepcopy, pickling and `.to(device)` copy every buffer. detach (so nn.Parameter(t), p.data,
      p.detach(), state_dict()) shares the record: what is written or rebound through one is seen through all.
    - copy_ from an NVFP4Tensor of the same shape and block copies bytes; any other copy_, fill_ and zero_
      quantize into the existing buffers, whose addresses stay. Any other operation that writes raises.

    torch does not let a subclass refuse `plain.data = t`, which breaks the plain tensor: give the module a
    new nn.Parameter(t) instead.
    """

    record: NVFP4Storage

    @staticmethod
    def __new__(cls, record: NVFP4Storage):
        properties = {"dtype": record.dtype, "device": record.device}
        return torch.Tensor._make_wrapper_subclass(cls, record.shape, **properties)

    def __init__(self, record: NVFP4Storage):
        self.record = record

    @property
    def rowwise_data(self) -> torch.Tensor | None:
        """uint8 [M, K/2]. Assigning rebinds: another uint8 buffer of that shape becomes the codes."""
        return self.record.rowwise_data

    @rowwise_data.setter
    def rowwise_data(self, value: torch.Tensor) -> None:
        self.record.rebind(value)

    # The other fields of NVFP4Storage; a buffer that the tensor does not have is None.
    columnwise_data = property(attrgetter("record.columnwise_data"))
    rowwise_scale = property(attrgetter("record.rowwise_scale"))
    rowwise_scale_expanded = property(attrgetter("record.rowwise_scale_expanded"))
    rowwise_scale_swizzled = property(attrgetter("record.rowwise_scale_swizzled"))
    columnwise_scale = property(attrgetter("record.columnwise_scale"))
    columnwise_scale_expanded = property(attrgetter("record.columnwise_scale_expanded"))
    columnwise_scale_swizzled = property(attrgetter("record.columnwise_scale_swizzled"))
    amax = property(attrgetter("record.amax"))
    columnwise_amax = property(attrgetter("record.columnwise_amax"))
    block = property(attrgetter("record.block"))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of dtype (default: the logical one), rounded once from float32.

        Differentiable.
        """
        if dtype is not None and dtype != self.dtype:
            return self.to(dtype)
        return torch.dequantize(self)

    def expanded_scale(self, columnwise: bool = False) -> torch.Tensor:
        """E4M3 [round_up(M, 128), round_up(ceil(K/16), 4)], a byte per row; columnwise: of [K, M].

        The persistent buffer if there is one, else computed. Raises ValueError where the side does not exist.
        """
        return tensor_ops.padded_scale(self.record, SIDES[columnwise], "expanded")

    def swizzled_scale(self, columnwise: bool = False) -> torch.Tensor:
        """As expanded_scale, in the order in which cuBLASLt and torch.nn.functional.scaled_mm read scales."""
        return tensor_ops.padded_scale(self.record, SIDES[columnwise], "swizzled")

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """What convert_model quantized, on the CPU; None when there is no such value or it was cleared.

        detach, `.to(device)` and deepcopy keep it; clone and pickling do not.
        """
        return self.record.attachments.get(INIT_VAL)

    def clear_high_precision_init_val(self) -> None:
        self.record.attachments.pop(INIT_VAL, None)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        record = self.record
        fields = [f"{name}={getattr(self, name)}" for name in ("dtype", "block", "device")]
        for side in SIDES:
            names = [name for name in SCALE_LAYOUTS if getattr(record, scale_name(side, name)) is not None]
            fields += [f"{side}={'+'.join(names)}"] if names else []
        if type(record.amax) is torch.Tensor and not record.amax.is_meta:  # others have no value to show
            fields.append(f"amax={record.amax.item():.6g}")
        fields += ["requires_grad=True"] if self.requires_grad else []
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {', '.join(fields)})"

    def __setitem__(self, index, value) -> None:
        raise RuntimeError("indexed assignment" + _WRITES)

    def share_memory_(self) -> "NVFP4Tensor":
        for _, buffer in self.record.buffers():
            buffer.share_memory_()
        return self

    def __copy__(self) -> "NVFP4Tensor":
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict) -> "NVFP4Tensor":
        """Shares no buffer with self. Tensors that share a record, deepcopied together, share the new one."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only an NVFP4Tensor that is a leaf of the autograd graph can be deepcopied")
        if id(self.record) not in memo:
            memo[id(self.record)] = tensor_ops.copy_record(self.record, torch.clone)
        new = memo[id(self)] = NVFP4Tensor(memo[id(self.record)]).requires_grad_(self.requires_grad)
        new.grad = copy.deepcopy(self.grad, memo)
        vars(new).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != "record"})
        return new

    def __reduce_ex__(self, protocol):
        names, context = self.__tensor_flatten__()
        buffers = {name: getattr(self, name) for name in names}
        for name, buffer in buffers.items():
            if buffer.untyped_storage().nbytes() > buffer.nbytes:  # do not write all of a flat buffer
                buffer = buffer.clone()
            if buffer.dtype == SCALE_DTYPE:  # which plain pickle writes and cannot read
                buffer = buffer.view(torch.uint8)
            buffers[name] = buffer
        is_parameter = isinstance(self, torch.nn.Parameter)
        state = (tuple(self.shape), context, buffers, self.record.name, self.requires_grad, is_parameter)
        return _rebuild_tensor, state

    def __tensor_flatten__(self):
        record = self.record
        tied = record.columnwise_amax is record.amax
        return [name for name, _ in record.buffers()], (record.dtype, record.block, tied)

    @staticmethod
    def __tensor_unflatten__(buffers: dict, context: tuple, outer_size, outer_stride) -> "NVFP4Tensor":
        dtype, block, tied = context
        record = NVFP4Storage(torch.Size(outer_size), dtype, block, **buffers)
        if tied:
            record.columnwise_amax = record.amax
        return NVFP4Tensor(record)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FUNCTIONS and not kwargs.keys() & {"out", "out_dtype"}:
                return _FUNCTIONS[func](*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in tensor_ops.HANDLERS:
            return tensor_ops.HANDLERS[func](*args, **kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                if any(isinstance(leaf, NVFP4Tensor) for leaf in tree_leaves(written)):
                    raise RuntimeError(f"{func}" + _WRITES)
        args, kwargs = tree_map_only(NVFP4Tensor, tensor_ops.plain, (args, kwargs))
        return func(*args, **kwargs)


def _set_data(tensor: NVFP4Tensor, value: torch.Tensor) -> None:
    """tensor.data = value makes the tensor share the record of another NVFP4Tensor."""
    if not isinstance(value, NVFP4Tensor):
        raise TypeError(
            f"data must be an NVFP4Tensor, got {type(value).__name__}: copy_ takes plain values, "
            "and a model gets another dtype before its weights are converted"
        )
    torch.Tensor.data.__set__(tensor, value)
    tensor.record = value.record
    note_rebinding()


_FUNCTIONS = {**tensor_ops.FUNCTIONS, torch.Tensor.data.__set__: _set_data}


def _rebuild_tensor(shape, context, buffers, name, requires_grad, is_parameter) -> NVFP4Tensor:
    buffers = {name: b.view(SCALE_DTYPE) if "scale" in name else b for name, b in buffers.items()}
    tensor = NVFP4Tensor.__tensor_unflatten__(buffers, context, shape, None)
    tensor.record.name = name
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild_tensor])


def quantize(
    x: torch.Tensor,
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    rowwise: bool = True,
    columnwise: bool = False,
    amax: torch.Tensor | None = None,
    scale_layouts: Sequence[str] = ("compact",),
    out: NVFP4Tensor | None = None,
) -> NVFP4Tensor:
    """Quantize x [..., K] of float32, bfloat16 or float16, K even, flattened to [M, K].

    block: (16, 16) for weights, where the columnwise copy is exactly the transpose; (1, 16) for activations.
    rowwise, columnwise: which copies to make; columnwise needs M even.
    amax: float32 [1] on x's device, the global amax to use instead of x's own; what is larger saturates.
    scale_layouts: persistent scale buffers out of "compact" (always there), "expanded", "swizzled".
    out: a tensor of x's shape, dtype, device and of this block to write to. It must have the buffers asked
    for, and every buffer it has is written.

    The result has no autograd history. TypeError for a wrong dtype, ValueError for a wrong shape or option.
    """
    if not isinstance(x, torch.Tensor) or isinstance(x, NVFP4Tensor):
        raise TypeError(f"x must be a plain torch.Tensor, got {type(x).__name__}")
    if x.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"x must have one of the dtypes {WEIGHT_DTYPES}, got {x.dtype}")
    if amax is not None:
        check_buffer("amax", amax, (1,), torch.float32, x.device)
    wanted = {"block": tuple(block), "rowwise": rowwise, "columnwise": columnwise}
    wanted["scale_layouts"] = check_layouts(scale_layouts)
    if out is None:
        record = allocate(x.shape, dtype=x.dtype, device=x.device, **wanted)
        out = NVFP4Tensor(record)
    else:
        _check_out(out, x, **wanted)
        torch.autograd.graph.increment_version(out)
    ops.quantize_into(x.detach().contiguous(), out.record, None if amax is None else amax.detach())
    return out


def _check_out(out, x: torch.Tensor, block, rowwise: bool, columnwise: bool, scale_layouts) -> None:
    if not isinstance(out, NVFP4Tensor):
        raise TypeError(f"out must be an NVFP4Tensor, got {type(out).__name__}")
    for rule in ("shape", "dtype", "device"):
        if getattr(out, rule) != getattr(x, rule):
            raise ValueError(f"out must have x's {rule} {getattr(x, rule)}, got {getattr(out, rule)}")
    if out.block != block:
        raise ValueError(f"out must have block {block}, got {out.block}")
    for side, asked in zip(SIDES, (rowwise, columnwise), strict=True):
        for layout in scale_layouts if asked else ():
            if getattr(out.record, scale_name(side, layout)) is None:
                raise ValueError(f"out must have {side} scales in the {layout} layout, got {out}")


def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    columnwise: bool = True,
    scale_layouts: Sequence[str] = ("compact",),
) -> NVFP4Tensor:
    """A weight to cast into, with 16x16 blocks; it holds zeros until then.

    Raises TypeError for a dtype that cannot be quantized, ValueError for a shape that NVFP4 cannot hold.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    options = {"columnwise": columnwise, "scale_layouts": scale_layouts}
    record = allocate(shape, dtype=dtype, device=device, **options)
    tensor_ops.zero(record)
    return NVFP4Tensor(record)
