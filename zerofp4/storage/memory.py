"""Whether a tensor has memory that a kernel may be handed, by its address, and whether it was exchanged."""

from collections.abc import Sequence

import torch


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError, which says what to pass instead, for a subclass with a dispatch of its own (DTensor,
    FakeTensor) and for a sparse layout; ValueError and RuntimeError as check_memory.
    """
    if dispatches(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own: pass a plain tensor, such "
            "as to_local() of a DTensor, or dequantize() of a quantized one"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}: pass its to_dense()")
    check_memory(name, tensor)


def dispatches(tensor: torch.Tensor) -> bool:
    """Whether operations on the tensor are its class's own, so that its memory need not mean anything."""
    kind = type(tensor)
    return kind is not torch.Tensor and kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__


def any_dispatches(tensors: Sequence[torch.Tensor]) -> bool:
    """dispatches() of any of a list. A step asks this of hundreds, so each class is asked once."""
    return any(map(dispatches, {type(tensor): tensor for tensor in tensors}.values()))


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError if the storage was freed or shrunk in place, as FSDP frees what it has gathered;
    ValueError if it is on a GPU and the address is no multiple of the elements' size.
    """
    if torch.compiler.is_compiling() or holds(tensor):
        return
    if is_freed(tensor):
        held = tensor.untyped_storage().nbytes()
        raise RuntimeError(
            f"{name} needs {_end(tensor)} bytes of its storage, which has {held}: it was freed or shrunk in "
            "place (resize_)"
        )
    raise ValueError(
        f"{name} is at address {tensor.data_ptr():#x} of a GPU, which is no multiple of the "
        f"{tensor.itemsize} bytes of its elements: pass a copy of its bytes"
    )


def holds(tensor: torch.Tensor) -> bool:
    """Whether check_memory() passes a tensor."""
    if dispatches(tensor):  # as traced ones do, whose memory means nothing
        return True
    return not (is_freed(tensor) or (tensor.is_cuda and tensor.data_ptr() % tensor.itemsize))


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the storage was freed or shrunk in place, and ends before the tensor's last element."""
    return tensor.untyped_storage().nbytes() < _end(tensor)


def _end(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the storage to the end of the tensor's last element."""
    if tensor.is_contiguous():
        held = tensor.nbytes
        return held and tensor.storage_offset() * tensor.itemsize + held
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.itemsize


def address_of(name: str, tensor: torch.Tensor | None) -> int:
    """The address of a tensor's elements, for a kernel; 0 for None and an empty tensor. Raises RuntimeError,
    as check_memory, for a whole storage that was freed in place since it was checked.
    """
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if not address:
        check_memory(name, tensor)
    return address


_rebindings = 0


def rebindings() -> int:
    """Counts copied and rebound records. While it is unchanged, no record has changed buffers."""
    return _rebindings


def note_rebinding() -> None:
    global _rebindings
    _rebindings += 1
