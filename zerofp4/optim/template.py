"""What an optimizer keeps of a parameter, found out before it has kept any."""

from typing import Any, NamedTuple

import torch

from zerofp4.optim.inner import options

STARTED = "started"
"""In a state dict, of an optimizer that counts no steps: 1 once the parameter has a state, else 0."""


class Entry(NamedTuple):
    """kind: "elements" for a value per element of the parameter, "scalar" for a tensor of one, or the type of
    a Python number.
    """

    kind: str | type
    dtype: torch.dtype
    device: torch.device


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


def make_template(
    optimizer_class: type[torch.optim.Optimizer], group: dict, defaults: dict, device: torch.device
) -> StateTemplate:
    """From a step with a parameter of two elements, an lr of its own and no gradient but zeros."""
    trial = torch.zeros(2, dtype=torch.float32, device=device)
    chosen = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options(group).items()}
    optimizer = optimizer_class([chosen | {"params": [trial]}], **defaults)
    lazy = not optimizer.state.get(trial)
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    found = optimizer.state.get(trial, {})
    return StateTemplate({k: entry_of(v, 2) for k, v in found.items() if v is not None}, lazy)


def entry_of(value: Any, numel: int) -> Entry:
    """Of the state of a parameter with more than one element."""
    if not isinstance(value, torch.Tensor):
        return Entry(type(value), torch.float64, torch.device("cpu"))
    return Entry("elements" if value.numel() == numel else "scalar", value.dtype, value.device)
