"""What a kernel may be handed: whether a tensor's memory is what its shape claims, and was not exchanged.

Kernels take addresses. A tensor that has none of its own, or less memory than its sizes say, would have them
read and write what belongs to others.
"""

from collections.abc import Iterable, Sequence

import torch


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises unless the memory of a tensor on a CPU or GPU holds its elements.

    TypeError, which says what to pass instead: a subclass with a dispatch of its own (DTensor, FakeTensor and
    other tensors over tensors), a layout that is not dense, a functionalized tensor, an efficient zero
    tensor. ValueError, RuntimeError: as check_memory.
    """
    if dispatches(tensor):
        kind = type(tensor).__name__
        raise TypeError(f"{name} is a {kind}, which has no memory of its own: pass {_inside(tensor)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}: pass its to_dense()")
    if torch._is_functional_tensor(tensor):
        raise TypeError(
            f"{name} is a functionalized tensor, which has no memory of its own: pass the tensor inside"
        )
    if tensor._is_zerotensor():
        raise TypeError(f"{name} is an efficient zero tensor, which has no memory: pass its clone()")
    check_memory(name, tensor)


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether operations on the tensor are its class's own, so that its memory need not mean anything."""
    return _class_dispatches(type(tensor))


def _class_dispatches(kind: type) -> bool:
    return kind is not torch.Tensor and kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def any_dispatches(tensors: Sequence[torch.Tensor]) -> bool:
    """dispatches() of any of a list. A step asks this of hundreds, so each class is asked once."""
    return any(map(_class_dispatches, set(map(type, tensors))))


def _inside(tensor: torch.Tensor) -> str:
    """What a caller has to pass in the place of a tensor that dispatches."""
    if hasattr(tensor, "to_local"):
        return "its to_local()"
    if hasattr(tensor, "fake_mode"):
        return "a tensor with data"
    if hasattr(tensor, "record"):
        return "its dequantize(), or the values that it was made from"
    return "the plain tensor inside"


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError where a storage does not reach to the tensor's last element, ValueError where a GPU
    could not load its elements: at an address that is no multiple of their size, as other libraries may hand
    over. (A CPU loads from any; kernels take vectors only where they find them aligned.) What is traced or
    transformed has no bytes to ask for.
    """
    if torch.compiler.is_compiling() or dispatches(tensor):
        return
    try:
        if holds(tensor):
            return
        held = tensor.untyped_storage().nbytes()
        address = tensor.data_ptr()
    except NotImplementedError:  # a tensor inside vmap or grad
        return
    needed = _end(tensor)
    if held < needed:
        raise RuntimeError(
            f"{name} needs {needed} bytes of its storage, which has {held}: it was freed or shrunk in place "
            "(resize_), or never was as large"
        )
    raise ValueError(
        f"{name} is at address {address:#x} of a GPU, which is no multiple of the {tensor.itemsize} "
        "bytes of its elements: pass a copy of its bytes"
    )


def address_of(name: str, tensor: torch.Tensor | None) -> int:
    """The address of a tensor's elements, for a kernel; 0 for None, and where it has none.

    Raises RuntimeError, as check_memory, where the storage was freed in place. Every launch asks, by one
    comparison: check_memory passed when the tensor was handed over, and FSDP frees what it has gathered.
    """
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if address < _LARGEST_STORAGE:
        check_freed(name, tensor, address)
    return address


def find_freed(tensors: Sequence[torch.Tensor]) -> int | None:
    """The first of dense tensors whose storage was freed in place; None where none was."""
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    if not may_be_freed(addresses):
        return None
    for i, (tensor, address) in enumerate(zip(tensors, addresses, strict=True)):
        if address < _LARGEST_STORAGE and not dispatches(tensor):
            if not (tensor._is_zerotensor() or holds(tensor)):
                return i
    return None


def may_be_freed(addresses: Iterable[int]) -> bool:
    """Whether the storage behind one of these addresses may have been freed in place; False if none was."""
    return min(addresses, default=_LARGEST_STORAGE) < _LARGEST_STORAGE


_LARGEST_STORAGE = 2**40
"""A freed storage is at address 0, so the address of a tensor in it is the tensor's offset in bytes. Most
memory lies above the largest offset that there can be. Some allocators of GPUs use addresses below it, where
each tensor is looked at more closely.
"""


def check_freed(name: str, tensor: torch.Tensor, address: int) -> None:
    """check_memory() of a tensor at an address where may_be_freed() holds, if it lies in a freed storage."""
    if address == tensor.storage_offset() * tensor.itemsize:
        check_memory(name, tensor)


def holds(tensor: torch.Tensor) -> bool:
    """Whether check_memory passes a plain tensor."""
    if tensor.untyped_storage().nbytes() < _end(tensor):
        return False
    return not (tensor.is_cuda and tensor.data_ptr() % tensor.itemsize)


def check_signs(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where the signs of a tensor's bytes are not those of its values."""
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} has its negative bit set, which kernels do not see: pass its resolve_neg()")


def _end(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the storage to behind the tensor's last element."""
    if tensor.is_contiguous():
        held = tensor.nbytes
        return held and tensor.storage_offset() * tensor.itemsize + held
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = tensor.numel() and 1 + sum((size - 1) * stride for size, stride in steps)
    return (tensor.storage_offset() + elements) * tensor.itemsize if elements else 0


_rebindings = 0


def rebindings() -> int:
    """How often a record was copied or rebound, or a tensor given another record: who saw this number
    knows that no record has got other buffers since.
    """
    return _rebindings


def note_rebinding() -> None:
    global _rebindings
    _rebindings += 1
