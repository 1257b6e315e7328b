"""What an optimizer keeps of a parameter, found out before it has kept any."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4.optim.classes import InnerClass
from zerofp4.optim.inner import options

STARTED = "started"
"""In a state dict, of an optimizer that counts no steps: 1 once the parameter has a state, else 0."""


ROWS, COLUMNS = 5, 7
"""Of the matrix in a trial, by which the sizes of state are told apart."""


class Entry(NamedTuple):
    """kind: "elements" for a value per element of the parameter, "scalar" for a tensor of one, "matrix" for a
    tensor of another shape of each matrix of the parameter, or the type of a Python number. trial_shape: of
    the third, for a matrix [ROWS, COLUMNS].
    """

    kind: str | type
    dtype: torch.dtype
    device: torch.device
    trial_shape: tuple[int, ...] = ()

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What is kept of a parameter of this shape, of one or of a stack of matrices."""
        if self.kind == "elements":
            return tuple(shape)
        if self.kind != "matrix":
            return ()
        *stack, rows, columns = shape
        sizes = {ROWS: rows, COLUMNS: columns}
        return (*stack, *(sizes.get(size, size) for size in self.trial_shape))


class StateTemplate(NamedTuple):
    """entries: by name. lazy: whether a parameter has no state before its first update."""

    entries: dict[str, Entry]
    lazy: bool

    @property
    def flag(self) -> str | None:
        """The scalar that is 0 of a parameter without state yet; None where each has one from the
        beginning.
        """
        if not self.lazy or not self.entries:
            return None
        return "step" if "step" in self.entries else STARTED


def template_key(inner: InnerClass, group: dict) -> Hashable:
    """Equal where the optimizer of a group keeps the same state: its class, and all of its options but the
    value of a float that is not 0.
    """

    def kind(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return torch.Tensor
        if isinstance(value, float):
            return float, value == 0
        return tuple(map(kind, value)) if isinstance(value, list | tuple) else repr(value)

    return inner.optimizer_class, inner.whole, *((k, kind(v)) for k, v in sorted(options(group).items()))


def make_template(inner: InnerClass, group: dict, device: torch.device) -> StateTemplate:
    """From a step with a parameter of two elements, or a small matrix, an lr of its own and no gradient but
    zeros.
    """
    trial = torch.zeros((ROWS, COLUMNS) if inner.whole else 2, dtype=torch.float32, device=device)
    chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options(group).items()}
    optimizer = inner.optimizer_class([chosen | {"params": [trial]}], **inner.defaults)
    lazy = not optimizer.state.get(trial)
    trial.grad = torch.zeros_like(trial)
    with _no_global_hooks():
        optimizer.step()
    found = optimizer.state.get(trial, {})
    return StateTemplate({k: entry_of(k, v, trial) for k, v in found.items() if v is not None}, lazy)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """A trial is no step of the run. To call the function that torch has wrapped is not enough: a class may
    call the step() of the class that it is based on.
    """
    kept = [(hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def entry_of(name: str, value: Any, trial: torch.Tensor) -> Entry:
    """Of the state of a parameter with more than one element."""
    if not isinstance(value, torch.Tensor):
        return Entry(type(value), torch.float64, torch.device("cpu"))
    if value.numel() == trial.numel():
        return Entry("elements", value.dtype, value.device)
    if trial.dim() == 1 or (
        name == "step" and value.numel() == 1
    ):  # which all matrices of a stack count alike
        return Entry("scalar", value.dtype, value.device)
    return Entry("matrix", value.dtype, value.device, tuple(value.shape))
