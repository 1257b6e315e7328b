"""What FusedAdamW takes: every rule about its options, parameters, gradients and state stands here."""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerofp4.storage import any_dispatches, check_memory, check_plain, check_signs, find_freed

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
STATE = ("step", "exp_avg", "exp_avg_sq")
_layout, _dtype, _device = map(attrgetter, ("layout", "dtype", "device"))


def check_options(options: dict[str, Any], where: str = "") -> None:
    """Raises TypeError or ValueError for options of a group that torch.optim.AdamW would refuse, or we do.

    where: what messages begin with.
    """
    check_amsgrad(options, where)
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"{where}lr must have one element, got shape {tuple(lr.shape)}")
    if len(betas) != 2 or any(isinstance(beta, torch.Tensor) for beta in betas):
        raise TypeError(f"{where}betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{where}betas[{i}] must be at least 0 and below 1, got {beta}")
    for name in ("lr", "eps", "weight_decay"):
        if not options[name] >= 0.0:
            raise ValueError(f"{where}{name} must be 0 or more, got {options[name]}")
        if options[name] == math.inf:
            raise ValueError(f"{where}{name} must be finite, got {options[name]}")


def check_edited_options(g: int, group: dict[str, Any], device: torch.device | None) -> None:
    """check_options before a step, without waiting for a GPU: the value of an lr there is not looked at."""
    lr = group["lr"]
    check_lr(f"param_groups[{g}]['lr']", lr, device)
    elsewhere = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
    check_options(group | {"lr": 0.0} if elsewhere else group, f"param_groups[{g}]: ")


def check_amsgrad(options: dict[str, Any], where: str = "") -> None:
    if options.get("amsgrad"):
        raise ValueError(
            f"{where}amsgrad=True is not supported: its third moment would be another 8 bytes of traffic per "
            "element in a kernel that is bound by memory; use torch.optim.AdamW"
        )


def check_lr(name: str, lr: float | torch.Tensor, device: torch.device | None) -> None:
    """Raises TypeError or ValueError for a tensor that kernels cannot read; one on the CPU is read here."""
    if not isinstance(lr, torch.Tensor) or lr.device.type == "cpu":
        return
    if lr.dtype != torch.float32 or lr.numel() != 1:
        raise TypeError(f"{name} on a GPU must be one element of float32, got {lr.dtype} {tuple(lr.shape)}")
    if device is not None and lr.device != device:
        raise ValueError(f"{name} is on {lr.device}, the parameters on {device}")


def check_scalar(name: str, scalar: torch.Tensor | None, device: torch.device | None) -> None:
    """Raises TypeError or ValueError for one element that kernels cannot read."""
    if scalar is None:
        return
    if not isinstance(scalar, torch.Tensor) or scalar.dtype != torch.float32 or scalar.numel() != 1:
        shown = type(scalar).__name__
        if isinstance(scalar, torch.Tensor):
            shown = f"{scalar.dtype} {tuple(scalar.shape)}"
        raise TypeError(f"{name} must be None or one element of float32, got {shown}")
    if device is not None and scalar.device != device:
        raise ValueError(f"{name} is on {scalar.device}, the parameters on {device}")
    check_plain(name, scalar)


def check_parameter(name: str, p: torch.Tensor, device: torch.device) -> None:
    """Raises TypeError or ValueError unless p is plain, contiguous, float32 and on the device."""
    if is_traceable_wrapper_subclass(p):
        raise TypeError(f"{name} must be a plain tensor, got {type(p).__name__}: give its float32 master")
    if p.layout != torch.strided or p.dtype != torch.float32:
        raise TypeError(f"{name} must be dense float32, got {p.dtype} of layout {p.layout}")
    check_signs(name, p)
    if not p.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {tuple(p.shape)} with strides {p.stride()}")
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {p.device}")
    if p.device != device:
        raise ValueError(f"{name} is on {p.device}, the first parameter on {device}")
    check_memory(name, p)


def find_unusable_gradient(
    gradients: Sequence[torch.Tensor | None], params: Sequence[torch.Tensor]
) -> int | None:
    """The position of the first gradient that kernels cannot read, or None."""
    pairs = list(zip(gradients, params, strict=True))
    with_gradient = [p for g, p in pairs if g is not None]
    if are_usable([g for g in gradients if g is not None], with_gradient):
        return None
    return next(i for i, (g, p) in enumerate(pairs) if g is not None and not are_usable([g], [p]))


def are_usable(gradients: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> bool:
    """Of gradients and their parameters. Every step asks: attribute by attribute, in loops in C."""
    return (
        not any_dispatches(gradients)
        and set(map(_layout, gradients)) <= {torch.strided}
        and not any(map(torch.Tensor.is_neg, gradients))
        and not any(map(torch.Tensor._is_zerotensor, gradients))
        and set(map(_dtype, gradients)) <= set(GRADIENT_DTYPES)
        and list(map(_device, gradients)) == list(map(_device, params))
        and list(map(torch.Tensor.numel, gradients)) == list(map(torch.Tensor.numel, params))
        and all(map(torch.Tensor.is_contiguous, gradients))
        and find_freed(gradients) is None
        and _are_aligned(gradients)
    )


def _are_aligned(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether a GPU can load their elements."""
    if not gradients or not gradients[0].is_cuda:
        return True
    together = functools.reduce(operator.or_, map(torch.Tensor.data_ptr, gradients))
    return together % 4 == 0 or all(g.data_ptr() % g.itemsize == 0 for g in gradients)


def gradient_error(name: str, gradient: torch.Tensor, p: torch.Tensor) -> Exception:
    """What is wrong with a gradient that is not usable."""
    name = f"the gradient of {name}"
    if gradient.layout is not torch.strided:
        return RuntimeError(f"{name} must be dense, got layout {gradient.layout}")
    try:
        check_plain(name, gradient)
        check_signs(name, gradient)
    except (TypeError, ValueError, RuntimeError) as error:
        return error
    if gradient.dtype not in GRADIENT_DTYPES:
        return TypeError(f"{name} must be float32 or bfloat16, got {gradient.dtype}")
    if gradient.device != p.device:
        return ValueError(f"{name} is on {gradient.device}, the parameter on {p.device}")
    if gradient.numel() != p.numel():
        return ValueError(f"{name} has {gradient.numel()} elements, the parameter {p.numel()}")
    return ValueError(
        f"{name} must be contiguous, got shape {tuple(gradient.shape)} with strides {gradient.stride()}"
    )


def check_loaded(states: Iterable[Any]) -> None:
    """Raises ValueError unless each state that a state dict has for a parameter is one of AdamW."""
    for state in states:
        if state and not all(key in state for key in STATE):
            raise ValueError(
                f"state_dict: a parameter's state must have {', '.join(STATE)}, got {list(state)}"
            )


def check_state(name: str, p: torch.Tensor, state: dict[str, Any]) -> None:
    """Raises ValueError unless the state of p is what an update writes to."""
    for key in STATE:
        tensor, numel = state[key], 1 if key == "step" else p.numel()
        found = (tensor.dtype, tensor.device, tensor.numel())
        if found != (torch.float32, p.device, numel) or not tensor.is_contiguous():
            raise ValueError(
                f"the state of {name}: {key} must be contiguous float32 with {numel} elements on {p.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
        check_memory(f"the state of {name}: {key}", tensor)


def check_capturable(groups: list[dict[str, Any]]) -> None:
    for g, group in enumerate(groups):
        if not group["capturable"]:
            raise RuntimeError(
                f"param_groups[{g}]['capturable'] must be True for step() to be captured in a CUDA graph"
            )
