"""The optimizers of the masters: one, or one for each class that groups of parameters name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerofp4.optim.classes import InnerClass, check_values, class_numbers
from zerofp4.optim.inner import copy_options, heeds_found_inf, options, reads_clip_factor, step_masters


def _differs(value: Any, other: Any) -> bool:
    """Whether an option is another one. What is in a tensor is not looked at: groups share it."""
    if value is other:
        return False
    return isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor) or value != other


class InnerOptimizers:
    """What updates the masters, with groups that are those of the parameters but for what is in them.

    classes: by group. masters: by the identity of a parameter, what this rank holds of its master, in the
    form that its class takes; nothing where it owns nothing.

    all: the optimizers, in the order in which their classes come first in the groups.
    """

    def __init__(
        self,
        classes: Sequence[InnerClass],
        param_groups: Sequence[dict],
        masters: Mapping[int, Sequence[torch.Tensor]],
    ):
        self._classes, self._numbers = list(classes), class_numbers(classes)
        self.all: tuple[torch.optim.Optimizer, ...] = ()
        for number in range(max(self._numbers) + 1):
            groups = [
                options(group) | {"params": [m for p in group["params"] for m in masters.get(id(p), ())]}
                for group in self._of(number, param_groups)
            ]
            inner = self._classes[self._numbers.index(number)]
            self.all += (inner.optimizer_class(groups, **inner.defaults),)
        self._note_options()

    def _note_options(self) -> None:
        """The options of `all` are those of the groups of parameters from now on."""
        self._noted = [options(group) for group in self.param_groups]

    def _of(self, number: int, by_group: Sequence) -> list:
        """Of what there is by group, that of the groups of one optimizer."""
        return [value for value, own in zip(by_group, self._numbers, strict=True) if own == number]

    @property
    def param_groups(self) -> list[dict]:
        """Theirs, in the order of the groups of parameters."""
        groups = [iter(optimizer.param_groups) for optimizer in self.all]
        return [next(groups[number]) for number in self._numbers]

    def push_options(self, param_groups: Sequence[dict]) -> None:
        """Raises RuntimeError for an option that others have changed in `all` since, as a scheduler of one of
        them does: it would be undone.
        """
        for g, (group, noted) in enumerate(zip(self.param_groups, self._noted, strict=True)):
            for key, value in noted.items():
                if _differs(group.get(key), value):
                    raise RuntimeError(
                        f"group {g} of the inner optimizer had {key}={value!r} and has {group.get(key)!r}, "
                        "which param_groups of the ZeroFP4Optimizer would undo: change these, and build "
                        "schedulers over the ZeroFP4Optimizer"
                    )
        copy_options(param_groups, self.param_groups)
        self._note_options()

    def pull_options(self, param_groups: Sequence[dict]) -> None:
        copy_options(self.param_groups, param_groups)
        self._note_options()

    # A step

    def heed_found_inf(self) -> bool:
        return all(map(heeds_found_inf, self.all))

    def read_clip_factor(self) -> bool:
        return all(map(reads_clip_factor, self.all))

    def step(self, **scalars: torch.Tensor | None) -> None:
        """step_masters() of each, one after the other."""
        for optimizer in self.all:
            step_masters(optimizer, **scalars)

    # State

    def state_of(self, master: torch.Tensor) -> dict[str, Any]:
        """Empty where there is none yet."""
        return next((o.state[master] for o in self.all if master in o.state), {})

    def present(self) -> list[tuple]:
        """State and groups as they are, for restore()."""
        return [(optimizer.state, optimizer.param_groups) for optimizer in self.all]

    def restore(self, present: Sequence[tuple]) -> None:
        """Undo a load(), which puts new objects in their place."""
        for optimizer, (state, groups) in zip(self.all, present, strict=True):
            optimizer.state, optimizer.param_groups = state, groups

    def load(self, param_groups: Sequence[dict], states: Mapping[int, dict], device: torch.device) -> None:
        """param_groups: with the options that groups are to have. states: by the identity of a master.

        Raises what the optimizers raise for options that are out of range, and for their state.
        """
        check_values(self._classes, param_groups, device)
        for number, optimizer in enumerate(self.all):
            masters = [master for group in optimizer.param_groups for master in group["params"]]
            places = {id(master): i for i, master in enumerate(masters)}
            groups = zip(self._of(number, param_groups), optimizer.param_groups, strict=True)
            optimizer.load_state_dict(
                {
                    "state": {i: states[key] for key, i in places.items() if states.get(key)},
                    "param_groups": [
                        options(new) | {"params": [places[id(master)] for master in own["params"]]}
                        for new, own in groups
                    ],
                }
            )
