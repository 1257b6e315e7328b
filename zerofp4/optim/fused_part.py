"""Some of the parameters that FusedAdamW updates: what a kernel launch over them needs, from step to step."""

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerofp4.cast import CastPlan
from zerofp4.ops import AdamWItem, AdamWStage, Addresses, MasterPiece, RankGradients
from zerofp4.optim import fused_checks as checks
from zerofp4.optim.amaxes import AmaxRoute


class Member(NamedTuple):
    """A parameter that a step updates or, without a gradient, only reads for its amaxes: what this rank holds
    of it and of its state, and the dtype of its gradient, None without one.
    """

    group: int
    position: int
    parameter: torch.Tensor
    dtype: torch.dtype | None
    state: dict[str, torch.Tensor] | None


class Part:
    """Parameters that are updated together, in one launch, and the plan that wants their amaxes."""

    def __init__(self, params: Sequence[torch.Tensor], plan: CastPlan | None):
        self.route = None if plan is None else AmaxRoute(plan, params)
        self.stage: AdamWStage | None = None
        self._layout: _Layout | None = None
        self._stream = 0
        self.captured: tuple[AdamWStage, ...] = ()
        """What CUDA graphs that were captured read and write, as long as one may be replayed."""

    def pieces(self, p: torch.Tensor) -> tuple[MasterPiece, ...]:
        """What the plan has of a parameter."""
        return () if self.route is None else self.route.pieces.get(p, ())

    def is_outdated(self) -> bool:
        return self.route is not None and self.route.is_outdated()

    def forget(self) -> None:
        """The next step takes all addresses anew."""
        self._layout = None

    def fits(self, members: Sequence[Member], stream: int, capturing: bool) -> bool:
        """Whether the stage of the last step will do: nothing but gradients has moved.

        A stage's memory is freed in the order of the stream that it was built on.
        """
        found = self._layout is not None and self._layout.fits(members)
        found = found and (capturing or stream == self._stream)
        if found and capturing and self.stage not in self.captured:
            self.captured = (*self.captured, self.stage)
        return found

    def build(self, items: Sequence[AdamWItem], members: Sequence[Member], stream: int) -> None:
        """A stage for members, all of which have their state now."""
        reduced = None if self.route is None else self.route.reduced
        self._layout = None  # until there is a stage for it
        self.stage = AdamWStage(items, reduced) if items else None
        self._layout, self._stream = _Layout(members), stream

    def run(
        self,
        members: Sequence[Member],
        gradients: Sequence[torch.Tensor | None],
        options: Sequence,
        brought: RankGradients | None = None,
    ) -> None:
        """gradients: of the members, of their dtypes. options: adamw_options of each group. brought: of
        members whose gradients are this rank's own.
        """
        if self.route is not None:
            self.route.begin()
        if self.stage is not None:
            first = 0
            for g, some in itertools.groupby(members, lambda member: member.group):
                last = first + len(list(some))
                self.stage.begin(options[g], first, gradients[first:last])
                first = last
            self.stage.update(brought)
        # As after any update in place, a backward pass through the old values must fail.
        torch.autograd.graph.increment_version([m.parameter for m in members if m.dtype is not None])
        if self.route is not None:
            self.route.end()


class _Layout:
    """What a stage depends on: which tensors it updates, where they are, and the dtypes of gradients. The
    addresses of gradients are no part of it: each step gives them anew.
    """

    def __init__(self, members: Sequence[Member]):
        self._tensors, self._dtypes = _held(members), [member.dtype for member in members]
        self._numels = list(map(torch.Tensor.numel, self._tensors))
        self._addresses = Addresses({}, {str(i): tensor for i, tensor in enumerate(self._tensors)})

    def fits(self, members: Sequence[Member]) -> bool:
        """Looks at every address, on a GPU too: an assignment to .data of a parameter leaves no mark."""
        tensors = _held(members)
        return (
            len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
            and [member.dtype for member in members] == self._dtypes
            and list(map(torch.Tensor.numel, tensors)) == self._numels
            and self._addresses.find_moved() is None
        )


def _held(members: Sequence[Member]) -> list[torch.Tensor]:
    tensors = [member.parameter for member in members]
    for member in members:
        if member.state:
            tensors += [member.state[key] for key in checks.STATE]
    return tensors
