"""What other code does to the parameters of an optimizer: replace them, clip or average their gradients."""

import gc
import sys
import types
import warnings
import weakref
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class Holder:
    """The parameters of one optimizer, which keeps them alive. A later holder of any of them takes over."""

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self.is_taken_over = False
        """Whether another optimizer was built over any of the parameters."""
        self._ids = set(map(id, parameters))
        self.watched: set[int] = set()
        """The ids of the parameters of watch_clipping(); none after end_watch()."""
        self.replaced: list[tuple[weakref.ref[nn.Module], str, torch.Tensor]] = []
        """(module, name of the parameter, the parameter that the module gave up), for find_replaced()."""
        if not _hook:
            _hook.append(register_module_parameter_registration_hook(_note_replaced))
        for earlier in list(_holders):
            earlier.is_taken_over |= not self._ids.isdisjoint(earlier._ids)
        _holders.add(self)

    def holds(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def find_replaced(self) -> torch.Tensor | None:
        """A parameter that its module has replaced and not put back, or None."""
        for module, name, parameter in self.replaced:
            now = module()
            if now is not None and now._parameters.get(name) is not parameter:
                return parameter
        self.replaced.clear()
        return None

    def watch_clipping(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warn if torch clips these parameters' gradients before they are averaged."""
        self.watched = set(map(id, parameters))
        _averaging.append(weakref.ref(self, _averaging.remove))

    def end_watch(self) -> None:
        _averaging[:] = [ref for ref in _averaging if ref() is not self]
        self.watched = set()


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook: list[Any] = []
"""The handle of _note_replaced, once there is a holder."""
_averaging: list[weakref.ref[Holder]] = []
"""Those that watch_clipping(), each until the first step of its optimizer."""


def _note_replaced(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Called by torch before a module's parameter is replaced: assigned, or loaded with assign=True."""
    old = module._parameters.get(name)
    if old is not None and old is not parameter:
        for holder in list(_holders):
            if holder.holds(old):
                holder.replaced.append((weakref.ref(module), name, old))


def is_held(parameter: torch.Tensor, apart_from: Holder | None) -> bool:
    """Whether an optimizer other than that of `apart_from` trains the parameter."""
    return any(holder.holds(parameter) for holder in list(_holders) if holder is not apart_from)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """tensor.grad of a quantized tensor.

    [Note: who reads a gradient] Clipping leaves no trace that tells it from other writes, such as DDP's or a
    trainer's division. So we look at the caller, and only until the first step.
    """
    if _averaging and not torch.compiler.is_compiling():
        frame = sys._getframe(2)  # 1 is __torch_function__
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            _warn_of_clipping(tensor, frame)
    return torch.Tensor.grad.__get__(tensor)


def _warn_of_clipping(tensor: torch.Tensor, frame: types.FrameType) -> None:
    functions = []
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        functions.append(frame.f_code.co_name)
        frame = frame.f_back
    holders = [own for own in (ref() for ref in _averaging) if own is not None and id(tensor) in own.watched]
    clips = [name for name in ("clip_grad_norm_", "clip_grad_value_") if name in functions]
    if not clips or not holders:
        return
    for holder in holders:
        holder.end_watch()
    if _are_in_ddp({id(tensor)}):  # its gradient is averaged by now
        return
    warnings.warn_explicit(
        f"torch.nn.utils.{clips[0]} clips this rank's own gradients, which step() of ZeroFP4Optimizer "
        "averages over the ranks afterwards: call optimizer.clip_grad_norm_ instead",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


def check_not_averaged(ids: Set[int]) -> None:
    """Raise RuntimeError if a DistributedDataParallel, which averages too, has one of these parameters."""
    if _are_in_ddp(ids):
        gc.collect()  # a wrapper that was deleted may be in a cycle
        if _are_in_ddp(ids):
            raise RuntimeError(
                "the model is in a DistributedDataParallel, which averages gradients in backward passes, and "
                "so does an optimizer with overlap='backward', offload_gradients or overlap='update': leave "
                "out either"
            )


def _are_in_ddp(ids: Set[int]) -> bool:
    """Whether a DistributedDataParallel has one of them. It marks no parameter, so look at all objects."""
    ddp = nn.parallel.DistributedDataParallel
    models = [o for o in gc.get_objects() if issubclass(type(o), ddp)]
    return any(id(p) in ids for model in models for p in model.parameters())
