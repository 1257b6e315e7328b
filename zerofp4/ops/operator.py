"""What all operators share: their registration and the checks of arguments that several take."""

from collections.abc import Callable, Sequence

import torch

from zerofp4.format import BLOCK, SCALE_DTYPE
from zerofp4.storage import Sides, check_buffer, sides_of

_backends: dict[str, tuple[torch.library.Library, Callable]] = {}
"""By operator: what keeps its implementation registered, and the implementation."""


def backend(name: str) -> Callable[[Callable], Callable]:
    """Registers a function as the CPU and the CUDA implementation of an operator."""

    def register(function: Callable) -> Callable:
        library, call = torch.library.Library("zerofp4", "FRAGMENT"), _with_tensors(name, function)
        torch.library.impl(f"zerofp4::{name}", ("cpu", "cuda"), lib=library)(call)
        _backends[name] = library, call
        return function

    return register


def without_backend(name: str) -> Callable:
    """The implementation of an operator, which is not registered from now on."""
    _, call = _backends.pop(name)
    return call


def fake(name: str) -> Callable[[Callable], Callable]:
    """Registers a function as the implementation of an operator on tensors without values."""
    register = torch.library.register_fake(f"zerofp4::{name}")
    return lambda function: register(_with_tensors(name, function))


def _with_tensors(name: str, function: Callable) -> Callable:
    """The function, but TypeError for None in place of a tensor that must be given, which torch lets pass."""
    arguments = getattr(torch.ops.zerofp4, name).default._schema.arguments
    tensors = [(i, each.name) for i, each in enumerate(arguments) if isinstance(each.type, torch.TensorType)]

    def call(*given):
        for i, argument in tensors:
            if given[i] is None:
                raise TypeError(f"zerofp4::{name}: {argument} must be a tensor, got None")
        return function(*given)

    return call


def check_block_rows(block_rows: int) -> None:
    if block_rows not in (1, BLOCK):
        raise ValueError(f"block_rows must be 1 or {BLOCK}, got {block_rows}")


def check_bytes(
    name: str, buffer: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Floats of one byte may also come as their uint8 bytes: much of torch, opcheck included, lacks them."""
    raw = buffer.view(torch.uint8) if buffer.dtype == dtype else buffer
    check_buffer(name, raw, shape, torch.uint8, device)


def check_scale(name: str, scale: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    check_bytes(name, scale, shape, SCALE_DTYPE, device)


def is_plain_call(x: torch.Tensor) -> bool:
    """Whether nobody but the backend would see the call of an operator on x: no tracing, no mode, no
    subclass. Then the backend is called as it is, which saves the host most of a call's time.
    """
    return (
        (type(x) is torch.Tensor or type(x) is torch.nn.Parameter)
        and (x.is_cpu or x.is_cuda)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
    )


def named_sides(names: Sequence[str], buffers: Sequence[torch.Tensor | None]) -> Sides:
    """The buffers that an operator was given, as sides."""
    present = {name: buffer for name, buffer in zip(names, buffers, strict=True) if buffer is not None}
    return Sides(**sides_of(present))


def check_complete(sides: Sides) -> None:
    """Raises ValueError unless there is a side, and each has elements and scales."""
    for name, side in sides.sides():
        if side.data is None or not side.scales:
            raise ValueError(f"{name}_data and at least one buffer of its scales must be given together")
    if sides.rowwise is None and sides.columnwise is None:
        raise ValueError("rowwise_data and columnwise_data are both None: there is nothing to write")


def check_given_amaxes(device, count: int, amax, columnwise_amax, hadamard: bool, sides: Sides) -> None:
    """Those to use in place of the input's own, `count` of each: one, or one for every group."""
    for name, given in (("amax", amax), ("columnwise_amax", columnwise_amax)):
        if given is not None:
            check_buffer(name, given, (count,), torch.float32, device)
    if columnwise_amax is not None and not hadamard:
        raise ValueError(
            "columnwise_amax is that of the Hadamard transform, but hadamard is False: both copies have amax"
        )
    if amax is not None and hadamard and sides.rowwise is None:
        raise ValueError("amax is that of the rowwise copy, but none is asked for: give columnwise_amax")


def check_own_amaxes(device, count: int, hadamard: bool, sides: Sides, amax, columnwise_amax) -> None:
    """Those that an operator is given to write to."""
    check_buffer("amax", amax, (count,), torch.float32, device)
    two = hadamard and sides.rowwise is not None
    if two != (columnwise_amax is not None):
        raise ValueError("a second amax belongs to a rowwise copy with a transformed columnwise one, only")
    if two:
        check_buffer("columnwise_amax", columnwise_amax, (count,), torch.float32, device)


def own_amaxes(hadamard: bool, sides: Sides) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the amax of the input and where that of its transform is kept; None where nothing needs it."""
    if not hadamard:
        return sides.amax, None
    return sides.rowwise and sides.rowwise.amax, sides.columnwise_amax
