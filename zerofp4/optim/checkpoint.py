"""What a ZeRO optimizer saves of its parameters, and reads back."""

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.optim.initial import initial_values
from zerofp4.optim.inner import InnerClass, InnerOptimizers
from zerofp4.optim.load import Target, read
from zerofp4.optim.matrices import join_states, split_state
from zerofp4.optim.names import SavedNames
from zerofp4.optim.piece import Home, Piece
from zerofp4.optim.seal import SealedTuple, make_id, sealed
from zerofp4.optim.sharded import ShardedParameters
from zerofp4.optim.state_dict import (
    ParameterId,
    StateTemplate,
    StateView,
    make_template,
    parameter_id,
    saved_entries,
    saved_groups,
    template_key,
)


class SavedState:
    """The masters of an optimizer and the state of its optimizers of masters, as a checkpoint has them.

    param_groups: returns those of the optimizer, as they are now.
    shards, inners: the trainable parameters with their masters, and the optimizers of these.
    classes: by parameter group, what updates its masters.
    names: of the parameters in checkpoints.
    token: of the ids of saves, the same on every rank.
    """

    def __init__(
        self,
        *,
        param_groups: Callable[[], Sequence[dict]],
        shards: ShardedParameters,
        inners: InnerOptimizers,
        classes: Sequence[InnerClass],
        names: SavedNames,
        token: str,
    ):
        self._param_groups, self._shards, self._inners = param_groups, shards, inners
        self._classes, self.names = classes, names
        self.token = token
        """Another one after each load."""
        self.steps = 0
        """How many steps the optimizer has taken, skipped ones too."""
        self.unsound: str | None = None
        """Why what is saved now must not be loaded: the optimizer is broken."""
        self._device = shards.parameters[0].device
        self._templates: dict[Hashable, StateTemplate] = {}

    @property
    def save_id(self) -> str:
        """The id of what is saved now."""
        return make_id(self.token, self.steps)

    @functools.cached_property
    def _homes(self) -> dict[int, Home]:
        """By id(trainable parameter); those of one process group share theirs."""
        homes: dict[dist.ProcessGroup | None, Home] = {}
        for reference in self._shards.groups():
            homes.setdefault(reference(), Home(reference, self._device))
        rows = zip(self._shards.parameters, self._shards.groups(), strict=True)
        return {id(p): homes[reference()] for p, reference in rows}

    def home_of(self, parameter: torch.Tensor) -> Home:
        """Where the pieces of a trainable parameter are."""
        return self._homes[id(parameter)]

    @functools.cached_property
    def _positions(self) -> dict[int, tuple[int, int, int]]:
        """By id(parameter), its group, its position there and its number."""
        groups = [group["params"] for group in self._param_groups()]
        every = ((g, i, p) for g, members in enumerate(groups) for i, p in enumerate(members))
        return {id(p): (g, i, number) for number, (g, i, p) in enumerate(every)}

    def number_of(self, parameter: torch.Tensor) -> ParameterId:
        """Its number in state dicts, which knows its name."""
        g, i, number = self._positions[id(parameter)]
        return parameter_id(self._param_groups()[g], i, number)

    def _template(self, parameter: torch.Tensor) -> StateTemplate:
        """What the optimizer of its master keeps of it, by the present options of its group."""
        g = self._positions[id(parameter)][0]
        inner, group = self._classes[g], self._param_groups()[g]
        key = template_key(inner, group)
        if key not in self._templates:
            self._templates[key] = make_template(inner, group, self._device)
        return self._templates[key]

    # Saving

    def entries(self, i: int) -> dict[str, Piece]:
        """What is saved of trainable parameter i: this rank's pieces, no copies."""
        p = self._shards.parameters[i]
        template = self._template(p)
        own = saved_entries(
            self.number_of(p).name,
            p,
            self._shards.held_master(i),
            self._state_of(i, template),
            template,
            self._homes[id(p)],
            self.names.refusals[i],
        )
        for piece in own.values():
            piece.written_by, piece.unsound = (self.save_id,), self.unsound
        return own

    def _state_of(self, i: int, template: StateTemplate) -> Mapping[str, Any]:
        """What the optimizer of the masters keeps of this rank's part of parameter i."""
        states = [self._inners.state_of(master) for master in self._shards.optimized[i]]
        if not states or self._shards.updated[i].work is None:
            return states[0] if states else {}
        return join_states(states, template, self._shards.parameters[i].shape)

    def view(self) -> StateView:
        """`state` of the optimizer: entries(), made as they are asked for."""
        me = weakref.ref(self)  # a cycle would keep the masters until the next collection
        return StateView(self._shards.parameters, lambda i: me().entries(i))

    def groups(self) -> SealedTuple:
        """`param_groups` of a state dict."""
        return sealed(saved_groups(self._param_groups(), self.names.elsewhere), self.save_id)

    def state_dict(self) -> dict[str, Any]:
        parameters = self._shards.parameters
        return {
            "state": {self.number_of(p): self.entries(i) for i, p in enumerate(parameters)},
            "param_groups": self.groups(),
            "steps": sealed(self.steps, self.save_id),
        }

    # Loading

    def read(
        self, state_dict: Any, written: Sequence[int], moved: str | None = None
    ) -> list[torch.Tensor | None]:
        """Check a state dict and give the optimizers of the masters their part: new objects, so that the old
        ones can come back.

        written: trainable parameters that somebody wrote to, whose masters follow them where there are none.
        moved: what has moved, so that every master must be there.

        Returns this rank's range of each master; None where it stays. Raises ValueError or TypeError.
        """
        by_parameter, chosen = read(
            state_dict, self._param_groups(), self._targets(), list(self._homes.values())
        )
        found = [by_parameter[id(p)] for p in self._shards.parameters]
        self._load_inners(chosen, [one.state for one in found])
        masters = [one.master for one in found]
        for i in written:
            if masters[i] is None:
                shard = self._shards.shards()[i]
                masters[i] = initial_values(self._shards.parameters[i])[shard.start : shard.end]
        own = zip(self._shards.names, self._shards.masters, masters, strict=True)
        stay = [name for name, mine, values in own if mine is not None and values is None]
        obstacle = self.unsound or moved
        if obstacle is not None and stay:
            raise ValueError(f"state_dict has no master of {', '.join(stay)}, and {obstacle}")
        return masters

    def _targets(self) -> dict[int, Target]:
        """What is loaded of each trainable parameter, by its id()."""
        targets = {}
        rows = zip(self._shards.parameters, self._shards.names, self._shards.shards(), strict=True)
        for p, label, shard in rows:
            name = self.number_of(p).name or label
            targets[id(p)] = Target(name, p.shape, shard, self._template(p), self.home_of(p))
        return targets

    def _load_inners(self, chosen: Sequence[dict], states: Sequence[dict]) -> None:
        groups = [group | new for group, new in zip(self._param_groups(), chosen, strict=True)]
        by_master = {}
        for i, (p, state) in enumerate(zip(self._shards.parameters, states, strict=True)):
            masters = self._shards.optimized[i]
            if self._shards.updated[i].work is None:
                parts = [state] * len(masters)
            else:
                parts = split_state(state, self._template(p), p.shape, len(masters))
            by_master |= {id(master): part for master, part in zip(masters, parts, strict=True)}
        self._inners.load(groups, by_master, self._device)
