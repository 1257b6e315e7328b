"""QuantizedTensor: a torch.Tensor over a record of quantized bytes, whatever their format."""

import copy
import hashlib
import sys
from collections.abc import Callable
from operator import attrgetter

import torch

from zerofp4 import ops
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.storage import Storage, note_rebinding, side_of
from zerofp4.tensors import backward_passes, dispatch, products, transfer
from zerofp4.tensors.held import gradient_of


def buffer_property(name: str) -> property:
    """A property that reads a buffer of the record, without a Python frame: torch 2.10 compiles a getter's
    frame as a function that reads the same property.
    """
    return property(ops.buffer_reader(name))


class QuantizedTensor(torch.Tensor):
    """A torch.Tensor of a logical shape and dtype, whose quantized bytes are in a storage record.

    - Operations not named here dequantize and give plain tensors; gradients flow through them. Writing to a
      view changes no codes, since it is a view of a dequantized copy. (Only a matrix of a stack, t[e], shares
      t's buffers.)
    - `nbytes` counts the bytes of the buffers. element_size() and itemsize are those of the logical dtype,
      since they cannot be fractions: numel() * element_size() is the size of the dequantized values.
    - `dequantize()` gives the values in the logical dtype, which `float()`, `half()`, `double()` and
      `.to(dtype)` convert. Only `dequantize(torch.float32)` gives the codes' exact values.
    - F.linear, matmul, mm, addmm and @ save the quantized tensor and dequantize it again in the backward
      pass. (Under torch.compile the compiler decides what is saved.)
    - clone, deepcopy, pickling, pin_memory, `.to(device)`, and empty_like and new_empty of the same size with
      a device keep the format. detach (so nn.Parameter(t), p.data, state_dict()) shares the record.
    - Module.half(), .to(dtype) and the like change a parameter's logical dtype and keep its codes. Other
      calls of Module.to() swap each parameter with a new tensor: hooks and grad_dtype stay, other attributes
      are lost.
    - copy_ from a tensor of the same format, shape and block copies bytes. Any other copy_, fill_ and zero_
      quantize into the existing buffers, which stay in place. Other operations that write raise.
    - torch.distributed's broadcast sends the buffers: all ranks must have the same formats. Other collectives
      read the values, and raise if they would write to the tensor. FSDP and DTensor, which would make plain
      parameters of the values, raise NotImplementedError.

    torch does not let a subclass refuse `plain.data = t`, which breaks the plain tensor: give the module a
    new nn.Parameter(t) instead.

    A format is a subclass: the type of its records, and two functions of them.
    """

    __slots__ = ("_kept_by_autograd",)
    """What torch.utils.swap_tensors hands to a setter: see _take_from_autograd."""

    record: Storage
    _record_type: type[Storage]
    _dequantize: Callable[[Storage, torch.dtype], torch.Tensor]
    """(record, one of WEIGHT_DTYPES): values, computed in float32 and rounded once."""
    _quantize_into: Callable[[torch.Tensor, Storage], None]
    """(contiguous values of the record's shape and dtype, record): into the buffers that the record has."""

    @staticmethod
    def __new__(cls, record: Storage | tuple, *buffers: torch.Tensor):
        """record: or (shape, context, names of `buffers`), as from `wrap`."""
        if buffers:
            shape, context, names = record
            named = dict(zip(names, buffers, strict=True))
            record = cls._record_type.from_buffers(torch.Size(shape), context, named)
        if not isinstance(record, cls._record_type):
            raise TypeError(
                f"record must be an {cls._record_type.__name__}, got {type(record).__name__}: quantize makes "
                "a tensor of values"
            )
        properties = {"dtype": record.dtype, "device": record.device}
        tensor = torch.Tensor._make_wrapper_subclass(cls, record.shape, **properties)
        tensor.record = record
        return tensor

    @property
    def rowwise_data(self) -> torch.Tensor | None:
        """The elements of the rowwise copy. Assigning takes another buffer of that shape and dtype."""
        return self.record.rowwise_data

    @rowwise_data.setter
    def rowwise_data(self, value: torch.Tensor) -> None:
        self.record.rebind(value)

    # The other buffers that every format has, or None.
    columnwise_data = buffer_property("columnwise_data")
    rowwise_scale = buffer_property("rowwise_scale")
    rowwise_scale_swizzled = buffer_property("rowwise_scale_swizzled")
    columnwise_scale = buffer_property("columnwise_scale")
    columnwise_scale_swizzled = buffer_property("columnwise_scale_swizzled")
    block = property(attrgetter("record.block"))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers. To sum the memory of a model, add up the nbytes of its parameters."""
        return sum(buffer.nbytes for _, buffer in self.record.places())

    @classmethod
    def _values_of(cls, record: Storage, dtype: torch.dtype) -> torch.Tensor:
        try:
            values = cls._dequantize(record, dtype if dtype in WEIGHT_DTYPES else torch.float32)
        except RuntimeError:
            record.check_memory("the tensor")  # by name, if that is it
            raise
        return values.view(record.shape).to(dtype)

    def swizzled_scale(self, columnwise: bool = False) -> torch.Tensor:
        """Scales in the order in which cuBLASLt and torch.nn.functional.scaled_mm read them, padded with 0:
        [round_up(M, 128), round_up(ceil(K/b), 4)] with blocks of b elements; columnwise: of [K, M].

        The persistent buffer if there is one, else computed. Raises ValueError if the side does not exist.
        """
        return ops.padded_scale(self.record, side_of(columnwise), "swizzled")

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of dtype (default: its own), rounded once. Differentiable."""
        return torch.dequantize(self) if dtype is None else products.Dequantize.apply(self, dtype)

    def _describe(self) -> list[str]:
        fields = [f"{name}={getattr(self, name)}" for name in ("dtype", "block", "device")]
        return [*fields, *(f"{name}={'+'.join(side.scale_places)}" for name, side in self.record.sides())]

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        fields = [*self._describe(), *["requires_grad=True"] * self.requires_grad]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {', '.join(fields)})"

    def untyped_storage(self) -> torch.UntypedStorage:
        transfer.refuse_safetensors(self, sys._getframe(1))
        return super().untyped_storage()

    def storage(self) -> torch.TypedStorage:
        transfer.refuse_safetensors(self, sys._getframe(1))
        return super().storage()

    def __setitem__(self, index, value) -> None:
        raise RuntimeError("indexed assignment" + dispatch.writes(self))

    def share_memory_(self) -> "QuantizedTensor":
        for _, buffer in self.record.buffers():
            buffer.share_memory_()
        return self

    def __copy__(self) -> "QuantizedTensor":
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict) -> "QuantizedTensor":
        """Shares no buffer with self. Tensors that share a record, deepcopied together, share the new one."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                f"only an {type(self).__name__} that is a leaf of the autograd graph can be deepcopied"
            )
        if id(self.record) not in memo:
            memo[id(self.record)] = transfer.copy_record(self.record, torch.clone)
        new = memo[id(self)] = type(self)(memo[id(self.record)]).requires_grad_(self.requires_grad)
        if self.grad is not None and self.grad.dtype != self.dtype:
            new.grad_dtype = self.grad.dtype
        new.grad = copy.deepcopy(self.grad, memo)
        vars(new).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k != "record"})
        return new

    def __reduce_ex__(self, protocol):
        return transfer.reduce_tensor(self)

    @classmethod
    def __tensor_unflatten__(cls, buffers: dict, context: tuple, outer_size, outer_stride):
        return cls(cls._record_type.from_buffers(torch.Size(outer_size), context, buffers))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if not kwargs:
                return _FUNCTIONS.get(func, func)(*args)
            if func in _FUNCTIONS and not kwargs.keys() & {"out", "out_dtype"}:
                return _FUNCTIONS[func](*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch.dispatch(func, args, kwargs or {})


def _set_data(tensor: QuantizedTensor, value: torch.Tensor) -> None:
    """tensor.data = value shares the record of another tensor of the format. Module.half() and .to(dtype)
    assign the tensor's own values in another dtype, which changes its dtype and keeps its codes.
    """
    if type(value) is not type(tensor):
        same = _in_dtype_of(value, tensor)
        if same is None:
            raise TypeError(
                f"data must be an {type(tensor).__name__}, got {type(value).__name__}: copy_ takes plain "
                f"values. A module may become one of {WEIGHT_DTYPES}, and .to({tensor.dtype}) takes back "
                f"what has become {value.dtype}. {dispatch.ADAPTERS}"
            )
        value = same
    torch.Tensor.data.__set__(tensor, value)
    tensor.record = value.record
    note_rebinding()


def _in_dtype_of(values: torch.Tensor, tensor: QuantizedTensor) -> QuantizedTensor | None:
    """The tensor in the dtype and on the device of `values`, if these are its own values; else None."""
    is_dtype = values.dtype in {*WEIGHT_DTYPES} - {tensor.dtype}
    if isinstance(values, QuantizedTensor) or not is_dtype or values.shape != tensor.shape:
        return None
    record = transfer.copy_record(tensor.record, lambda buffer: buffer.to(values.device))
    record.dtype = values.dtype
    own = dispatch.plain(tensor).to(values.device, values.dtype)
    return type(tensor)(record) if torch.equal(own.nan_to_num(), values.nan_to_num()) else None


def _kept_by_autograd(tensor: QuantizedTensor) -> dict[str, object]:
    """A leaf's hooks, and the dtype of its gradients if that is not its own."""
    if not tensor.is_leaf:
        return {}
    with torch._C.DisableTorchFunctionSubclass():
        defaults = {"_backward_hooks": None, "_post_accumulate_grad_hooks": None, "grad_dtype": tensor.dtype}
        kept = {name: getattr(tensor, name, default) for name, default in defaults.items()}
    return {name: value for name, value in kept.items() if value is not defaults[name]}


def _take_from_autograd(tensor: QuantizedTensor, kept: dict[str, object]) -> None:
    """Module.to() swaps each parameter with a new tensor, which lacks the hooks of the old."""
    note_rebinding()
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in kept.items():
            setattr(tensor, name, value)


def _refuse_to_apply(tensor: torch.Tensor, *_) -> None:
    """torch would write past every operator, to memory that does not exist."""
    raise RuntimeError(f"apply_ and map2_: this{dispatch.writes(tensor)}")


_FUNCTIONS = {
    **backward_passes.FUNCTIONS,
    **products.FUNCTIONS,
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.grad.__get__: gradient_of,
    torch.Tensor.apply_: _refuse_to_apply,
    torch.Tensor.map2_: _refuse_to_apply,
}


def wrap(cls: type[QuantizedTensor], record: Storage) -> QuantizedTensor:
    """A tensor over the record, also under torch.compile."""
    if not torch.compiler.is_compiling():
        return cls(record)
    buffers = dict(record.buffers())
    return cls((tuple(record.shape), record.context(), tuple(buffers)), *buffers.values())


def _stable_hash(tensor: QuantizedTensor) -> str:
    """The tensor's key in torch's cache of compiled graphs."""
    names, context = tensor.__tensor_flatten__()
    buffers = [getattr(tensor, name) for name in names]
    inner = [(b.dtype, b.device, b.shape, b.stride()) for b in buffers]
    known = type(tensor).__name__, tensor.requires_grad, context, names, inner
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


QuantizedTensor.__tensor_flatten__ = ops.flatten_method(QuantizedTensor)
QuantizedTensor._stable_hash_for_caching = _stable_hash
QuantizedTensor._kept_by_autograd = property(_kept_by_autograd, _take_from_autograd)
_codes = QuantizedTensor.rowwise_data  # for type checkers
QuantizedTensor.rowwise_data = property(buffer_property("rowwise_data").fget, _codes.fset, doc=_codes.__doc__)
