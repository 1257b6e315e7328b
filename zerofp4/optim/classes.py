"""Which class of optimizer updates which masters, and what it must see of them: every rule about
optimizer_class stands here.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.engine import Updated
from zerofp4.optim.inner import options
from zerofp4.optim.options import check_finite
from zerofp4.optim.parameters import parameter_name

OWN_CLASS = "optimizer_class"
"""In a group of parameters that somebody gives, the class that updates their masters."""

NOT_ELEMENTWISE = {
    "Adafactor": "its second moments are sums over rows and columns of a matrix: whole_matrices=True gives "
    "it whole ones",
    "LBFGS": "its update takes inner products over all parameters",
    "SparseAdam": "it needs sparse gradients, and gradients are reduced as dense ones",
}
"""Optimizers that give other results on pieces of a parameter than on the whole of it."""

TAKES_MATRICES = ("Adafactor",)
"""Those of them that whole matrices are enough for."""

NEEDS_MATRICES = ("Muon",)
"""Optimizers that get whole matrices without being asked for."""


class InnerClass(NamedTuple):
    """What updates the masters of a group. defaults: options of groups that do not have them. whole: whether
    it gets every matrix whole, else it gets 1D pieces of parameters.
    """

    optimizer_class: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    whole: bool

    @property
    def name(self) -> str:
        return f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"

    def trial(self, device: torch.device) -> torch.Tensor:
        """The smallest parameter that it takes."""
        return torch.zeros((1, 1) if self.whole else 1, dtype=torch.float32, device=device)


def group_classes(
    param_groups: Sequence[dict], optimizer_class: type, whole_matrices: bool | None, defaults: dict
) -> list[InnerClass]:
    """By group: its own `optimizer_class`, or the optimizer's, which alone the defaults and whole_matrices
    are for.

    Raises TypeError for what is no torch.optim.Optimizer, ValueError for one that cannot be sharded, and for
    a group with a class of its own that lacks an option which the optimizer's class was given.
    """
    if not (whole_matrices is None or isinstance(whole_matrices, bool)):
        raise TypeError(f"whole_matrices must be None, True or False, got {whole_matrices!r}")
    main = _inner_class("optimizer_class", optimizer_class, defaults, whole_matrices)
    found = {optimizer_class: main}
    for g, group in enumerate(param_groups):
        own = group.get(OWN_CLASS, optimizer_class)
        where = f"param_groups[{g}]['optimizer_class']"
        if own not in found:
            found[own] = _inner_class(where, own, {}, None)
        lacking = set() if own is optimizer_class else inspect.signature(own).parameters.keys() - group.keys()
        missing = [name for name in defaults if name in lacking]
        if missing:
            raise ValueError(
                f"{where} is {own.__name__}, and {', '.join(missing)} was given for "
                f"{optimizer_class.__name__}: a group with a class of its own needs its own"
            )
    classes = [found[group.get(OWN_CLASS, optimizer_class)] for group in param_groups]
    if main not in classes and (defaults or whole_matrices):
        given = ", ".join([*defaults, *(["whole_matrices"] if whole_matrices else [])])
        raise ValueError(f"{given}: given for {optimizer_class.__name__}, which is the class of no group")
    return classes


def without_class(group: dict) -> dict:
    """The group itself, if it names none."""
    return {key: value for key, value in group.items() if key != OWN_CLASS} if OWN_CLASS in group else group


def _inner_class(where: str, optimizer_class: Any, defaults: dict, whole: bool | None) -> InnerClass:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"{where} must be a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
    bases = {base.__name__ for base in optimizer_class.__mro__}
    needs = any(name in bases for name in NEEDS_MATRICES)
    if needs and whole is False:
        raise ValueError(f"whole_matrices=False: {optimizer_class.__name__} orthogonalizes whole matrices")
    for name, reason in NOT_ELEMENTWISE.items():
        if name in bases and not (whole and name in TAKES_MATRICES):
            raise ValueError(
                f"{where}: {optimizer_class.__name__} cannot run on shards of parameters, {reason}"
            )
    return InnerClass(optimizer_class, defaults, bool(needs or whole))


def class_numbers(classes: Sequence[InnerClass]) -> list[int]:
    """By group, the number of its class, in the order in which they come first."""
    numbers: dict[type, int] = {}
    return [numbers.setdefault(inner.optimizer_class, len(numbers)) for inner in classes]


def try_options(
    classes: Sequence[InnerClass], param_groups: Sequence[dict], device: torch.device
) -> list[torch.optim.Optimizer]:
    """By group, an optimizer of one element with its options: wrong ones are found before any rank has
    changed anything.
    """
    return [
        inner.optimizer_class([options(group) | {"params": [inner.trial(device)]}], **inner.defaults)
        for inner, group in zip(classes, param_groups, strict=True)
    ]


def check_values(classes: Sequence[InnerClass], param_groups: Sequence[dict], device: torch.device) -> None:
    """Raises what the optimizer's constructor raises for values of options that are out of range, since torch
    looks at those of the defaults only, and ValueError for a NaN or Inf, which torch does not look for.
    """
    check_finite([inner.defaults | group for inner, group in zip(classes, param_groups, strict=True)])
    for inner, group in zip(classes, param_groups, strict=True):
        known = inspect.signature(inner.optimizer_class).parameters.keys() - {"params"}
        own = {key: value for key, value in group.items() if key in known}
        inner.optimizer_class([inner.trial(device)], **(inner.defaults | own))


def how_updated(
    param_groups: Sequence[dict], classes: Sequence[InnerClass], tried: Sequence[torch.optim.Optimizer]
) -> list[Updated]:
    """Of each trainable parameter. tried: what try_options() returned. Raises ValueError for one that is no
    matrix, nor a stack of them, where its optimizer is to get whole ones.
    """
    found = []
    for g, (group, number) in enumerate(zip(param_groups, class_numbers(classes), strict=True)):
        steps = tried[g].param_groups[0].get("ns_steps", 1)
        for i, p in enumerate(group["params"]):
            if not p.requires_grad:
                continue
            if classes[g].whole and p.dim() not in (2, 3):
                raise ValueError(
                    f"{parameter_name(g, i, group)} has shape {tuple(p.shape)}, and {classes[g].name} gets "
                    "whole matrices: of 2D parameters and of stacks in 3D ones. Give it a group with another "
                    "optimizer_class"
                )
            found.append(Updated(number, matrix_work(p.shape, steps) if classes[g].whole else None))
    return found


def matrix_work(shape: Sequence[int], steps: Any) -> int:
    """What an update by Muon costs: multiplications and additions of `steps` of its iteration, for each
    matrix of a stack. Those of other classes are taken to grow alike.
    """
    *stack, rows, columns = shape
    short, long = sorted((rows, columns))
    steps = steps if isinstance(steps, int) and steps > 0 else 1
    return math.prod(stack) * steps * (4 * short**2 * long + 2 * short**3)


def check_amax_groups(numbers: Sequence[int], updated: Sequence[Updated], names: Sequence[str]) -> None:
    """Raises ValueError for weights that share an amax and have different optimizers, which would put one
    bucket into two.

    numbers: by parameter, that of its amax group.
    """
    first: dict[int, int] = {}
    for i, number in enumerate(numbers):
        j = first.setdefault(number, i)
        if updated[i].by != updated[j].by:
            raise ValueError(
                f"amax_groups: {names[j]} and {names[i]} share an amax, but not their optimizer_class"
            )
