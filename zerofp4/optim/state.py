"""What a ZeRO optimizer saves, loads, gathers and hands over."""

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import GroupReference, OwnError, error_text, exchange
from zerofp4.optim.initial import initial_values
from zerofp4.optim.inner import InnerClass, InnerOptimizers
from zerofp4.optim.load import (
    Target,
    check_same_steps,
    find_saves,
    load_error,
    pieces_of,
    read,
    warn_of_options,
)
from zerofp4.optim.matrices import join_states, split_state
from zerofp4.optim.names import SavedNames
from zerofp4.optim.piece import Home, Piece
from zerofp4.optim.rounds import Rounds
from zerofp4.optim.seal import SealedTuple, check_one_save, draw_token, make_id, sealed
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
from zerofp4.optim.votes import Votes
from zerofp4.optim.watch import ParameterWatch, Snapshot


class ShardedState(torch.optim.Optimizer):
    """An optimizer whose masters are sharded: the half of ZeroFP4Optimizer that no step needs."""

    process_group: GroupReference
    inners: InnerOptimizers
    _classes: list[InnerClass]
    """By group."""
    _parameters: list[torch.Tensor]
    _shards: ShardedParameters
    _saved_names: SavedNames
    _votes: Votes
    _watch: ParameterWatch
    _reduced: Snapshot | None
    _rounds: Rounds | None
    """Where gradients travel before step() is called."""
    _steps: int
    _token: str
    """Of the ids of saves: the same on every rank, another after each load."""
    _unheard: str | None
    """What went wrong on this rank alone, and the next step is to tell the others."""
    _weights_follow: bool
    """False from load_state_dict to the next step: weights that were written meanwhile yield to the
    masters.
    """

    broken: RuntimeError | None = None
    """Why this rank's masters may be of two steps, else None: an interrupt, or in a world of one any error,
    came behind the agreement of a step, or any error behind that of load_state_dict(). step(),
    clip_grad_norm_() and saving raise from then on, until load_state_dict() has brought all masters.
    """

    def _break(self, call: str, error: BaseException) -> None:
        """Keeps the error's text, not the error, whose traceback has frames that hold this."""
        self.broken = RuntimeError(
            f"{call} was left in the middle ({error_text(error)}), and masters may be of two steps"
        )

    def _raise_if_broken(self) -> None:
        if self.broken is not None:
            raise RuntimeError(
                f"the optimizer is of no more use: {self.broken}. Load a checkpoint (load_state_dict()), or "
                "build a new optimizer"
            ) from self.broken

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of the masters. Where groups have several classes there is one for each, in
        `inners.all`, and this raises AttributeError.
        """
        if len(self.inners.all) > 1:
            names = " and ".join(type(optimizer).__name__ for optimizer in self.inners.all)
            raise AttributeError(f"the masters have {names}: take them from inners.all")
        return self.inners.all[0]

    def _push_options(self) -> None:
        self.inners.push_options(self.param_groups)

    def _pull_options(self) -> None:
        self.inners.pull_options(self.param_groups)

    def _publish(
        self,
        found_inf: torch.Tensor | None = None,
        update: Callable[[int], None] | None = None,
        error: Exception | None = None,
    ) -> None:
        try:
            self._shards.publish(found_inf, update, error)
        finally:
            del error  # see OwnError
            self._watch.accept_values()

    def _follow_masters(self) -> None:
        """Before a step: a model that was loaded after its optimizer has the values of the masters again."""
        if not self._weights_follow:
            self._publish()
            self._weights_follow = True

    # What is saved

    @functools.cached_property
    def _homes(self) -> dict[int, Home]:
        """By the identity of the trainable parameter; those of one process group share theirs."""
        homes: dict[dist.ProcessGroup | None, Home] = {}
        for reference in self._shards.groups():
            homes.setdefault(reference(), Home(reference, self._device))
        rows = zip(self._shards.parameters, self._shards.groups(), strict=True)
        return {id(p): homes[reference()] for p, reference in rows}

    @property
    def _device(self) -> torch.device:
        return self._shards.parameters[0].device

    def home_of(self, parameter: torch.Tensor) -> Home:
        """Where the pieces of a trainable parameter are."""
        return self._homes[id(parameter)]

    def has_other_parameters_elsewhere(self) -> bool:
        """Whether there is a rank that trains other parameters than this one. The same on every rank."""
        return len(self._votes.slots.labels) > len(self._votes.slots.own)

    @functools.cached_property
    def _made_templates(self) -> dict[Hashable, StateTemplate]:
        return {}

    def _template(self, g: int) -> StateTemplate:
        """Of a group, from its present options."""
        inner, group, made = self._classes[g], self.param_groups[g], self._made_templates
        key = template_key(inner, group)
        if key not in made:
            made[key] = make_template(inner, group, self._device)
        return made[key]

    @functools.cached_property
    def _positions(self) -> dict[int, tuple[int, int, int]]:
        """Of each parameter its group, its position there and its number, by its identity."""
        groups = [group["params"] for group in self.param_groups]
        every = ((g, i, p) for g, members in enumerate(groups) for i, p in enumerate(members))
        return {id(p): (g, i, number) for number, (g, i, p) in enumerate(every)}

    def _number_of(self, parameter: torch.Tensor) -> tuple[int, ParameterId]:
        """Its group and its number."""
        g, i, number = self._positions[id(parameter)]
        return g, parameter_id(self.param_groups[g], i, number)

    def _entries(self, i: int) -> dict[str, Piece]:
        """What is saved of trainable parameter i."""
        p, held = self._shards.parameters[i], self._shards.held_master(i)
        g, number = self._number_of(p)
        template, refusal = self._template(g), self._saved_names.refusals[i]
        state = self._state_of(i, template)
        own = saved_entries(number.name, p, held, state, template, self._homes[id(p)], refusal)
        for piece in own.values():
            piece.written_by = (self._save_id,)
            piece.unsound = None if self.broken is None else f"{self.broken}: it must not be saved"
        return own

    @property
    def _save_id(self) -> str:
        """Of what is saved now."""
        return make_id(self._token, self._steps)

    def _saved_groups(self) -> SealedTuple:
        return sealed(saved_groups(self.param_groups, self._saved_names.elsewhere), self._save_id)

    def _state_of(self, i: int, template: StateTemplate) -> Mapping[str, Any]:
        """What the optimizer of the masters keeps of this rank's part of parameter i."""
        states = [self.inners.state_of(master) for master in self._shards.optimized[i]]
        if not states or self._shards.updated[i].work is None:
            return states[0] if states else {}
        return join_states(states, template, self._shards.parameters[i].shape)

    def _view_state(self) -> StateView:
        reference = weakref.ref(self)  # a circle would keep the masters until the next collection
        return StateView(self._shards.parameters, lambda i: reference()._entries(i))

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """In the form of torch.optim: `state` by number and `param_groups`. Not collective, and as in
        torch.optim no copy.

        Every rank has the same keys: of each trainable parameter `master` and what optimizer_class keeps of
        it, zeros before its first update; what it keeps of several matrices is a copy. A tensor has the
        parameter's shape and says which elements of it are here; torch.distributed.checkpoint saves and loads
        it in a world of any size, under the parameter's name where the optimizer was built with
        named_parameters(), and full_tensor(), which is collective, gathers it. torch.save writes what this
        rank has, for the same rank of a world of the same size.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._push_options()
        state_dict = {
            "state": {self._number_of(p)[1]: self._entries(i) for i, p in enumerate(self._shards.parameters)},
            "param_groups": self._saved_groups(),
            "steps": sealed(self._steps, self._save_id),
        }
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    # What is loaded

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict; the weights follow its masters, also those that a model has loaded before
        or loads until the next step.

        A state dict of this class, read by torch.distributed.checkpoint in a world of any size or by
        torch.load on the rank and in the world that saved it; or one of another optimizer with whole tensors,
        as torch.optim has it. Parameters are matched by name where both sides have names
        (named_parameters()), so that groups may differ: each group gets the options that all groups of its
        members were saved with. Without names groups must be the same. State of parameters that are not
        trained here is left out. Where there are no masters (torch.optim), they stay as they are, but for
        weights that were written to since the last step: those give theirs anew.

        The state_dict() of another optimizer of the same ranks, as it is, may be of fewer parameters: those
        that it lacks keep what they have here. So a new optimizer goes on from an old one, with parameters
        added or unfrozen.

        Collective. When any rank's state dict does not fit, a parameter of it was moved, or the ranks bring
        states of different steps or what two saves wrote, every rank raises ValueError (TypeError for what is
        no dict), which lists the names, and nothing changes. The same happens where the optimizer is `broken`
        and a master would stay.
        """
        before, loaded, steps, saves, error = self.inners.present(), None, 0, None, OwnError()
        try:
            self._watch.check_places(self.param_groups)
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = hook(self, state_dict) or state_dict
            loaded = self._read(state_dict)
            steps, saves = int(state_dict.get("steps", 0)), find_saves(state_dict, self._save_id)
        except Exception as failure:  # whatever it is, every rank raises it
            error = OwnError(load_error(failure))
        except BaseException:
            self.inners.restore(before)
            raise
        try:
            told = exchange((steps, saves, draw_token()), error, self.process_group(), "load_state_dict()")
            by_rank, saves_by_rank, (token, *_) = zip(*told, strict=True)
            check_same_steps(by_rank)
            check_one_save(saves_by_rank)
            warn_of_options(state_dict, self._saved_groups())
        except BaseException:
            self.inners.restore(before)
            raise
        try:
            self._pull_options()
            for master, values in zip(self._shards.masters, loaded, strict=True):
                if master is not None and values is not None:
                    master.copy_(values)
            for piece in pieces_of(state_dict):
                piece.settle()
            self._steps, self._token, self._reduced, self._unheard = steps, token, None, None
            self._publish()
            self._shards.settle()
        except BaseException as failure:
            self._break("load_state_dict()", failure)
            raise
        self._weights_follow, self.broken = False, None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _read(self, state_dict: Any) -> list[torch.Tensor | None]:
        """Check the state dict and give the inner optimizer its part: new objects, so that the old can come
        back.

        Returns this rank's range of each master; None where it stays as it is.
        """
        by_parameter, chosen = read(
            state_dict, self.param_groups, self._targets(), list(self._homes.values())
        )
        found = [by_parameter[id(p)] for p in self._shards.parameters]
        self._load_inner(chosen, [one.state for one in found])
        written = set(self._watch.written())
        masters = [
            self._present_values(i) if one.master is None and i in written else one.master
            for i, one in enumerate(found)
        ]
        own = zip(self._shards.names, self._shards.masters, masters, strict=True)
        stay = [name for name, mine, values in own if mine is not None and values is None]
        if self.broken is not None and stay:
            raise ValueError(f"state_dict has no master of {', '.join(stay)}, and {self.broken}")
        return masters

    def _targets(self) -> dict[int, Target]:
        """What is loaded of each trainable parameter, by its identity."""
        targets = {}
        rows = zip(self._shards.parameters, self._shards.names, self._shards.shards(), strict=True)
        for p, label, shard in rows:
            g, number = self._number_of(p)
            targets[id(p)] = Target(number.name or label, p.shape, shard, self._template(g), self.home_of(p))
        return targets

    def _present_values(self, i: int) -> torch.Tensor:
        shard = self._shards.shards()[i]
        return initial_values(self._shards.parameters[i])[shard.start : shard.end]

    def _load_inner(self, chosen: Sequence[dict], states: Sequence[dict]) -> None:
        groups = [group | new for group, new in zip(self.param_groups, chosen, strict=True)]
        by_master = {}
        for i, (p, state) in enumerate(zip(self._shards.parameters, states, strict=True)):
            masters = self._shards.optimized[i]
            if self._shards.updated[i].work is None:
                parts = [state] * len(masters)
            else:
                parts = split_state(state, self._template(self._number_of(p)[0]), p.shape, len(masters))
            by_master |= {id(master): part for master, part in zip(masters, parts, strict=True)}
        self.inners.load(groups, by_master, self._device)

    @torch.no_grad()
    def gathered_masters(self) -> list[torch.Tensor | None]:
        """The whole FP32 masters in the order and shape of the parameters; None for frozen ones. Collective.

        For checks: it takes the memory that sharding saves.
        """
        trainable = self._shards.parameters
        masters = {id(p): m for p, m in zip(trainable, self._shards.gathered_masters(), strict=True)}
        return [masters.get(id(p)) for p in self._parameters]

    def gathered_bytes_per_step(self) -> dict[str, int]:
        """Bytes of the buffers that the ranks of the group gather together in each step; 0 in a world of one.

        nvfp4: codes; high_precision: all other weights; bf16_equivalent: all weights if they were bfloat16.
        """
        return self._shards.gathered_bytes()
