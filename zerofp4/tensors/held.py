"""Parameters that optimizers hold: what becomes of a model whose parameters are replaced under them."""

import gc
import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class Holder(Protocol):
    """An optimizer that goes on training the parameter objects that it was built with."""

    def holds(self, parameter: torch.Tensor) -> bool: ...

    def note_replaced(self, parameter: torch.Tensor) -> None:
        """A module has given up a parameter that holds() is true for; another may still have it."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_hook: list[Any] = []
"""The handle of _note_replaced, once there is a holder."""


def register_holder(holder: Holder) -> None:
    """From now on, and for as long as it lives, the holder hears of its parameters being replaced."""
    if not _hook:
        _hook.append(register_module_parameter_registration_hook(_note_replaced))
    _holders.add(holder)


def _note_replaced(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """torch calls it before a module's parameter becomes another: assigned, or loaded with assign=True."""
    old = module._parameters.get(name)
    if old is not None and old is not parameter:
        for holder in list(_holders):
            if holder.holds(old):
                holder.note_replaced(old)


def check_not_held(name: str, parameter: torch.Tensor) -> None:
    """Raises RuntimeError for a parameter that is about to be replaced and that an optimizer holds."""
    if not _is_held(parameter):
        return
    gc.collect()  # an optimizer that was deleted may be in a cycle
    if _is_held(parameter):
        raise RuntimeError(
            f"{name} is held by a ZeroFP4Optimizer, which would go on training the parameter that is to be "
            "replaced: convert a model before its optimizer is built, or delete that optimizer first"
        )


def _is_held(parameter: torch.Tensor) -> bool:
    return any(holder.holds(parameter) for holder in list(_holders))


def find_in_no_module(parameters: list[torch.Tensor]) -> int | None:
    """The position of the first parameter that no living module has, or None. Looks at every object of the
    interpreter.
    """
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    held = {id(p) for module in modules for p in vars(module).get("_parameters", {}).values()}
    return next((i for i, parameter in enumerate(parameters) if id(parameter) not in held), None)
