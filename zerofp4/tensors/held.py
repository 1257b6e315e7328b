"""Parameters that optimizers hold: what becomes of a model whose parameters are replaced under them, or their
gradients clipped behind their back.
"""

import gc
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class Holder(Protocol):
    """An optimizer that goes on training the parameter objects that it was built with."""

    world_size: int
    """Of the ranks that it averages gradients over."""

    def holds(self, parameter: torch.Tensor) -> bool: ...

    def note_replaced(self, parameter: torch.Tensor) -> None:
        """A module has given up a parameter that holds() is true for; another may still have it."""

    def note_taken_over(self) -> None:
        """Another holder has taken a parameter that holds() is true for."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_warned: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook: list[Any] = []
"""The handle of _note_replaced, once there is a holder."""


def register_holder(holder: Holder, parameters: Iterable[torch.Tensor]) -> None:
    """From now on, and for as long as it lives, the holder hears of its parameters being replaced, or taken
    over by another. parameters: those that it holds, and that others held before.
    """
    if not _hook:
        _hook.append(register_module_parameter_registration_hook(_note_replaced))
    parameters = list(parameters)
    for earlier in list(_holders):
        if any(map(earlier.holds, parameters)):
            earlier.note_taken_over()
    _holders.add(holder)


def _note_replaced(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """torch calls it before a module's parameter becomes another: assigned, or loaded with assign=True."""
    old = module._parameters.get(name)
    if old is not None and old is not parameter:
        for holder in list(_holders):
            if holder.holds(old):
                holder.note_replaced(old)


def check_not_held(named: Sequence[tuple[str, torch.Tensor]], apart_from: Sequence[object] = ()) -> None:
    """Raises RuntimeError for the first of these parameters, which are to be replaced, that an optimizer or
    DistributedDataParallel holds, other than `apart_from`. Each parameter must be in a module. Where anything
    else refers to one of them, looks at every object that the collector tracks (none that gc.freeze() put
    away).
    """
    if not _has_other_references(named):
        return
    found = _find_held(named, apart_from)
    if found is None:
        return
    gc.collect()  # what was deleted may be in a cycle
    found = _find_held(named, apart_from)
    if found is not None:
        name, owner = found
        raise RuntimeError(
            f"{name} is held by a {owner}, which would go on using the parameter that is to be replaced: "
            f"build the {owner} after the conversion, or delete that one first"
        )


def _has_other_references(named: Sequence[tuple[str, torch.Tensor]]) -> bool:
    """Whether anything but one module and `named` refers to one of these parameters.

    Every optimizer and DistributedDataParallel does, from a list of its own. The parameters of most models
    that are converted have no such reference, and a look at all objects takes 50 ms in a large process.
    """
    [in_a_list] = map(sys.getrefcount, [object()])  # and in this call, which counts itself
    counts = map(sys.getrefcount, [parameter for _, parameter in named])
    return any(count > in_a_list + 2 for count in counts)


def _find_held(
    named: Sequence[tuple[str, torch.Tensor]], apart_from: Sequence[object]
) -> tuple[str, str] | None:
    """The name of one that is held, and what holds it."""
    owner_of: dict[int, str] = {}
    tracked = gc.get_objects()
    kinds = {kind for kind in set(map(type, tracked)) if issubclass(kind, _OWNERS)}  # of 10**5 objects, in C
    owners = [o for o in tracked if type(o) in kinds] if kinds else []
    for owner in (o for o in owners if not any(o is one for one in apart_from)):
        parameters = owner.parameters() if isinstance(owner, nn.Module) else _optimized(owner)
        owner_of |= {id(p): type(owner).__name__ for p in parameters if p.requires_grad}
    for name, parameter in named:
        holders = [holder for holder in list(_holders) if not any(holder is one for one in apart_from)]
        trained = any(holder.holds(parameter) for holder in holders)  # also one that was frozen since
        owner = "ZeroFP4Optimizer" if trained else owner_of.get(id(parameter))
        if owner is not None:
            return name, owner
    return None


def _optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


_OWNERS = (torch.optim.Optimizer, nn.parallel.DistributedDataParallel)
"""What keeps the very parameters that it was built with."""

_CLIP = nn.utils.clip_grad.__file__


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """parameter.grad, of a quantized tensor as __torch_function__ sees it.

    Where it is torch.nn.utils.clip_grad_norm_ that reads it and several ranks average such gradients: warns,
    once for each optimizer. Nothing later could: the gradients look as those that a GradScaler has unscaled.
    """
    if _holders and not torch.compiler.is_compiling():
        frame, level = sys._getframe(2), 4  # as warn() below counts
        if frame.f_code.co_name == "<listcomp>":
            frame, level = frame.f_back, level + 1
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_code.co_filename == _CLIP:
            while frame is not None and frame.f_code.co_filename == _CLIP:
                frame, level = frame.f_back, level + 1
            _warn_of_local_norm(parameter, level)
    return parameter.grad


def _warn_of_local_norm(parameter: torch.Tensor, level: int) -> None:
    for holder in list(_holders):
        if holder.world_size > 1 and holder not in _warned and holder.holds(parameter):
            _warned.add(holder)
            warnings.warn(
                "torch.nn.utils.clip_grad_norm_ clips this rank's gradients by the norm of these alone, "
                f"before ZeroFP4Optimizer averages them over {holder.world_size} ranks: call the optimizer's "
                "clip_grad_norm_ (unless something else, such as DDP, has averaged them)",
                stacklevel=level,
            )


def find_in_no_module(parameters: list[torch.Tensor]) -> int | None:
    """The position of the first parameter that no living module has, or None. Looks at every object of the
    interpreter.
    """
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    held = {id(p) for module in modules for p in vars(module).get("_parameters", {}).values()}
    return next((i for i, parameter in enumerate(parameters) if id(parameter) not in held), None)
