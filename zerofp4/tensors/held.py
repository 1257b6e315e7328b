"""Parameters that optimizers hold, and what others do to them: replace them, clip their gradients."""

import gc
import sys
import types
import warnings
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class Holder:
    """Parameters that an optimizer trains, and whether a model still has them, and this optimizer alone.

    parameters: of the optimizer, which keeps them alive. Earlier holders of any of them are taken over.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self._ids = set(map(id, parameters))
        self.replaced: list[torch.Tensor] = []
        """Those that a module has given up since the last find_replaced()."""
        self.is_taken_over = False
        """Whether another optimizer was built over any of the parameters."""
        self.watched: set[int] = set()
        """The ids of parameters that watch_clipping() was given."""
        if not _hook:
            _hook.append(register_module_parameter_registration_hook(_note_replaced))
        for earlier in list(_holders):
            earlier.is_taken_over |= not self._ids.isdisjoint(earlier._ids)
        _holders.add(self)

    def watch_clipping(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on torch.nn.utils.clip_grad_norm_ of these parameters, frozen ones among them, warns: the
        optimizer will average the gradients over ranks.
        """
        self.watched = set(map(id, parameters))
        _averaging.append(weakref.ref(self, _averaging.remove))

    def end_watch(self) -> None:
        _averaging[:] = [ref for ref in _averaging if ref() is not self]

    def holds(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def find_replaced(self) -> torch.Tensor | None:
        """A parameter that was replaced in its module and is in no other. Looks at every object of the
        interpreter once a module has given up one.
        """
        if not self.replaced:
            return None
        modules = _instances(nn.Module)
        present = {id(p) for module in modules for p in vars(module).get("_parameters", {}).values()}
        found = next((p for p in self.replaced if id(p) not in present), None)
        if found is None:
            self.replaced.clear()
        return found


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook: list[Any] = []
"""The handle of _note_replaced, once there is a holder."""


def _note_replaced(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """torch calls it before a module's parameter becomes another: assigned, or loaded with assign=True."""
    old = module._parameters.get(name)
    if old is not None and old is not parameter:
        for holder in list(_holders):
            if holder.holds(old):
                holder.replaced.append(old)


_averaging: list[weakref.ref[Holder]] = []
"""Those that watch_clipping(), each until the first step of its optimizer."""


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """tensor.grad of a quantized tensor.

    [Note: who reads a gradient] Clipping leaves no trace that tells it from a gradient that was divided by
    hand, or from one that DDP has averaged and a trainer has clipped: version counters count all three. So
    the caller is looked at, and only until a first step.
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
    if "clip_grad_norm_" not in functions or not holders:
        return
    for holder in holders:
        holder.end_watch()
    if _are_in_ddp({id(tensor)}):  # its gradient is averaged by now
        return
    warnings.warn_explicit(
        "torch.nn.utils.clip_grad_norm_ clips by the norm of this rank's own gradients, which step() of "
        "ZeroFP4Optimizer averages over the ranks afterwards: call optimizer.clip_grad_norm_ instead",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


def check_not_held(named: Sequence[tuple[str, torch.Tensor]], apart_from: Sequence[object] = ()) -> None:
    """Raise RuntimeError for the first of these parameters, which are to be replaced, that an optimizer or
    DistributedDataParallel holds, other than `apart_from`. Each parameter must be in a module.

    Where anything else refers to one of them, looks at every object that the collector tracks (none that
    gc.freeze() put away).
    """
    if not _has_other_references(named) or _find_held(named, apart_from) is None:
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
    for owner in (o for o in _instances(_OWNERS) if not any(o is one for one in apart_from)):
        parameters = owner.parameters() if isinstance(owner, nn.Module) else _optimized(owner)
        owner_of |= {id(p): type(owner).__name__ for p in parameters if p.requires_grad}
    holders = [holder for holder in list(_holders) if not any(holder is one for one in apart_from)]
    for name, parameter in named:
        trained = any(holder.holds(parameter) for holder in holders)  # also one that was frozen since
        owner = "ZeroFP4Optimizer" if trained else owner_of.get(id(parameter))
        if owner is not None:
            return name, owner
    return None


def _instances(classes: type | tuple[type, ...]) -> list[Any]:
    tracked = gc.get_objects()
    kinds = {kind for kind in set(map(type, tracked)) if issubclass(kind, classes)}  # of 10**5 objects, in C
    return [o for o in tracked if type(o) in kinds] if kinds else []


def _are_in_ddp(ids: Set[int]) -> bool:
    """Whether a DistributedDataParallel has a parameter with one of these ids."""
    found = _instances(nn.parallel.DistributedDataParallel)
    return any(id(p) in ids for model in found for p in model.parameters())


def check_not_averaged(ids: Set[int]) -> None:
    """Raise RuntimeError if a DistributedDataParallel has a parameter with one of these ids, for an optimizer
    that averages gradients in backward passes. Looks at every object, as check_not_held() does.
    """
    if not _are_in_ddp(ids):
        return
    gc.collect()  # what was deleted may be in a cycle
    if not _are_in_ddp(ids):
        return
    raise RuntimeError(
        "the model is in a DistributedDataParallel, which averages gradients in backward passes, and so does "
        "an optimizer with overlap='backward', overlap='update' or accumulate='sharded': leave out either"
    )


def _optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


_OWNERS = (torch.optim.Optimizer, nn.parallel.DistributedDataParallel)
"""What keeps the very parameters that it was built with."""
