"""FusedAdamW: AdamW in one pass over memory, which also computes the tile amaxes that the next cast needs."""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4 import ops
from zerofp4.cast import CastPlan, StagedPlan
from zerofp4.engine import UPDATE_DTYPES, Arrived, Bucket, Transport
from zerofp4.optim.groups import parameter_name
from zerofp4.optim.inner import has_hooks
from zerofp4.optim.moments import (
    COMPACT,
    FULL,
    Slice,
    check_choice,
    check_rows,
    converted,
    first_state,
    locals_of,
    scales_shape,
    suits_compact,
)
from zerofp4.storage import check_buffer, check_plain, dispatches

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""What else torch.optim.AdamW has in its groups. `fused` tells its load_state_dict where steps belong."""

_KEPT = {False: FULL, True: COMPACT}
"""The entries of state, by whether it is compact."""

_NO_STATE = {compact: dict.fromkeys(kept) for compact, kept in _KEPT.items()}
_entries = {compact: operator.itemgetter(*kept) for compact, kept in _KEPT.items()}
_Tensors = Sequence[torch.Tensor | None]
_Words = Mapping[torch.Tensor, torch.Tensor]
_Device = torch.device | None


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for float32 parameters such as master weights, in one pass over memory for them all.

    lr: a float, or a tensor of one element. On a GPU it must be float32, and only the kernels read it.
    betas, eps, weight_decay, maximize, capturable: as in torch.optim.AdamW. amsgrad=True raises ValueError.
    state: "full" keeps float32 moments. "compact" keeps them in 8 bits each for parameters of at least two
        dimensions with rows of at least 64 elements. A group may choose with its own "state".

    Parameters are contiguous float32 on one device, CPU or CUDA; gradients are contiguous float32 or
    bfloat16. Of a DTensor, as fully_shard makes it, every rank updates its own shard, and the state is made
    of DTensors too. An update is reference.adamw_step, or with compact state reference.compact_adamw_step of
    masters in float32, bit for bit on every device. param_groups (but for "state"), full state and state_dict
    are those of torch.optim.AdamW(fused=True), and each class loads what the other saved (but not amsgrad).
    Compact state is exp_avg_codes, int8, and exp_avg_sq_codes, uint8, in the shape of the parameter, and
    float32 scales (docs/numerics.md). load_state_dict() converts state of the other kind.

    step() neither synchronizes nor copies anything back. With capturable=True it can be captured in a CUDA
    graph, after a step with the same parameters and gradient dtypes; gradients may lie elsewhere by then.

    Before anything has changed, ValueError or TypeError is raised for options out of range and for other
    parameters and gradients than these, RuntimeError for sparse gradients.
    """

    found_inf: torch.Tensor | None = None
    """float32 of one element on the parameters' device. Where it is not 0, a step leaves parameters and state
    as they are, and counts nothing. The kernels read it, as those of torch's fused optimizers read theirs.
    """

    clip_factor: torch.Tensor | None = None
    """float32 of one element on the parameters' device. A step multiplies gradients by it, in float32, as it
    reads them. The gradients themselves stay as they are.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        state: str = "full",
    ):
        self._chosen: dict[torch.Tensor, str] = {}
        """By parameter, the `state` of its group when it was added."""
        self._slices: dict[torch.Tensor, Slice] = {}
        """By parameter, what it is a slice of: those of ZeroFP4Optimizer that are kept in compact state."""
        self._take_parts([Part()])
        self._captured: set[ops.AdamWStage] = set()
        """What CUDA graphs have captured: a replay reads its tables."""
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        options |= {"maximize": maximize, "capturable": capturable, "state": state}
        super().__init__(params, options | _TORCH_OPTIONS)

    def _take_parts(self, parts: Sequence["Part"], part_of: Mapping[torch.Tensor, int] | None = None) -> None:
        self._parts, self._part_of = parts, part_of or {}
        """What is launched in turn, and the number of a parameter's part, where that is not 0."""
        self._assigned: list[list[Any]] | None = None
        """By group, its kind of state and the ids of the parameters when the parts last got theirs."""
        self._laid_out: Any = None
        """The dtypes of gradients and ops.state_facts() when all parts were last seen to be laid out."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Raises where the constructor does."""
        param_group = dict(param_group)
        slices = param_group.pop("slices", {})  # of ZeroFP4Optimizer
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            seen: set[torch.Tensor] = set()
            for i, (p, local) in enumerate(zip(group["params"], locals_of(group["params"]), strict=True)):
                name = parameter_name(len(self.param_groups) - 1, i, group)
                _check_parameter(name, local, self._device(), slices.get(p))
                if p in seen:
                    raise ValueError(f"{name} is in the group twice")
                seen.add(p)
            self._check_choices(self.param_groups)
        except Exception:
            self.param_groups.pop()
            raise
        self._slices |= slices

    def _check_choices(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError where the `state` of a group has changed, and where DTensors cannot have it."""
        chosen = {}
        for g, group in enumerate(param_groups):
            for i, p in enumerate(group["params"]):
                chosen[p] = self._chosen.get(p, group["state"])
                check_choice(f"param_groups[{g}]", group["state"], chosen[p])
                if p not in self._chosen and self._is_compact(p, group):
                    check_rows(parameter_name(g, i, group), p)
        self._chosen = chosen

    def __setstate__(self, state: dict[str, Any]) -> None:
        slices = vars(self).setdefault("_slices", {})  # a copy has none
        vars(self).setdefault("_chosen", {})
        defaults = {"state": "full"} | (state.get("defaults") or self.defaults)
        for group in state["param_groups"]:
            group.setdefault("state", defaults["state"])
            _check_options(defaults | group)
        self._check_choices(state["param_groups"])
        for group in state["param_groups"]:
            for p in group["params"]:
                entries = _received(state["state"].get(p, {}), p.device)
                if entries and p not in slices:  # that of slices comes as it is kept
                    entries = converted(p, entries, self._is_compact(p, group))
                if entries:
                    state["state"][p] = entries
        super().__setstate__(state)
        if not hasattr(self, "_parts"):  # this is a copy, or was unpickled
            self._take_parts([Part()])
            self._captured = set()
        for group in self.param_groups:
            group.update(_TORCH_OPTIONS)
            for p in group["params"]:
                entries = self.state.get(p)
                if entries:  # a step counted on the CPU or in a Python number comes to the parameter
                    entries["step"] = torch.as_tensor(entries["step"], dtype=torch.float32, device=p.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Each group keeps its own choice of `state`: full state is encoded, or
        compact state decoded, where this optimizer keeps the other kind.
        """
        handle = self.register_load_state_dict_pre_hook(_shield)  # the last one of all
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _device(self) -> _Device:
        """The device of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    def _is_compact(self, p: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the state of a parameter of this group is compact."""
        return p in self._slices or (group["state"] == "compact" and suits_compact(p.shape))

    # Amaxes for casts

    def offer_amaxes(self, plan: CastPlan) -> None:
        """From now on every step() computes the amaxes of the plan's masters into the plan's reduced vector,
        so that the next plan.step() need not. Replaces a plan offered before.

        A master without gradient is read for it, not updated. If masters are written between step() and
        plan.step(), call plan.refresh(), which takes the amaxes back: amaxes_outdated() tells, and
        ZeroFP4Optimizer does it. Call offer_amaxes anew after masters have moved and the plan was refreshed.

        Raises ValueError if a master of the plan is not one of the parameters, and where shards cut blocks of
        1x16.
        """
        self._take_parts([Part(plan.staged, [p for group in self.param_groups for p in group["params"]])])

    def offer_parts(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], StagedPlan | None]],
        present: _Words | None = None,
    ) -> None:
        """offer_amaxes() of several plans: each part is updated in a launch of its own, in this order.

        parts: parameters, and the plan whose masters are among them, or None. Each parameter of the optimizer
            is in one part.
        present: by parameter, float64 of one element on its device, which the kernels read. Where it is 0,
            the parameter counts as one without gradient.
        """
        part_of = {p: k for k, (params, _) in enumerate(parts) for p in params}
        self._take_parts([Part(plan, params, present) for params, plan in parts], part_of)

    def amaxes_outdated(self) -> bool:
        """Whether anybody, such as a hook or a subclass, has written to a master of an offered plan after the
        last step(): the plan's amaxes are then outdated. A write through .data is not noticed.
        """
        return any(part.versions != part.read_versions() for part in self._parts)

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        closure: evaluated once, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = self._begin(self.found_inf, self.clip_factor)
        work = [(part, locals_of([p.grad for p in part.listed])) for part in self._parts]
        for part, gradients in work:
            part.check(gradients)
        self._lay_out([[g if g is None else g.dtype for g in gradients] for _, gradients in work])
        for part, gradients in work:
            part.run(gradients, options)
        return loss

    def _begin(self, found_inf: torch.Tensor | None, clip_factor: torch.Tensor | None) -> list[Any]:
        """Check the options, and give the parts their parameters. Returns ops.adamw_options of each group."""
        device = self._device()
        for name, scalar in (("found_inf", found_inf), ("clip_factor", clip_factor)):
            if scalar is not None:
                _check_scalar(name, scalar, device, "must be None or one element of float32")
        for g, group in enumerate(self.param_groups):
            _check_options(group, f"param_groups[{g}]", device)
        ids = [[group["state"], *map(id, group["params"])] for group in self.param_groups]
        if ids != self._assigned:
            self._check_choices(self.param_groups)
            held: list[list[Member]] = [[] for _ in self._parts]
            for g, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"]):
                    is_compact, name = self._is_compact(p, group), parameter_name(g, i, group)
                    held[self._part_of.get(p, 0)].append(Member(p, g, name, is_compact, self._slices.get(p)))
            for part, members in zip(self._parts, held, strict=True):
                part.hold(members)
            self._assigned, self._laid_out = ids, None
        for part in self._parts:
            part.params = locals_of(part.listed)
        scalars = {"skip": found_inf, "factor": clip_factor}
        return [ops.adamw_options(**group | scalars) for group in self.param_groups]

    def _lay_out(self, dtypes: Sequence[Sequence[torch.dtype | None]]) -> None:
        """Make all that part.run() needs: state of first updates, and stages unless the last ones will do.

        dtypes: by part, of gradients in the order of its parameters; one with None needs no state.
        """
        listed = list(itertools.chain.from_iterable(part.listed for part in self._parts))
        keys = list(itertools.chain.from_iterable(part.keys for part in self._parts))
        facts = ops.state_facts(listed, self.state, keys)
        if facts is None or (dtypes, facts) != self._laid_out:
            self._laid_out = None  # an error may leave some parts with other stages
            by_id = dict(zip(map(id, self.state), self.state.values(), strict=True))  # torch hashes in Python
            for part, own in zip(self._parts, dtypes, strict=True):
                self._lay_out_part(part, own, list(map(by_id.get, map(id, part.listed))))
            self._laid_out = dtypes, facts
        if listed and ops.is_capturing(self._device()):
            self._captured.update(stage for part in self._parts for stage in part.stages.values())

    def _lay_out_part(
        self, part: "Part", dtypes: Sequence[torch.dtype | None], states: list[dict[str, Any] | None]
    ) -> None:
        """A stage holds addresses, so every step compares them all, on a GPU too: an assignment to .data of a
        parameter leaves no other mark. Where gradients lie does not matter.
        """
        made = {}
        if not all(states):
            for i, (p, _, _, compact, of) in enumerate(part.members):
                if not states[i] and dtypes[i] is None:
                    states[i] = _NO_STATE[compact]
                elif not states[i]:
                    states[i] = made.setdefault(p, first_state(p, compact, of))
        entries = part.entries(states)
        if None in dtypes:
            dtypes = [dtype or before for dtype, before in zip(dtypes, part.dtypes, strict=True)]
        facts = ops.tensor_facts(part.params + entries)
        if facts != part.facts or dtypes != part.dtypes:
            if part.params and ops.is_capturing(part.params[0].device):
                raise RuntimeError(
                    "the first step() with these parameters and gradient dtypes cannot be captured in a CUDA "
                    "graph: make one such step before the capture"
                )
            part.build(entries, dtypes)
            part.facts, part.dtypes = facts, dtypes
        self.state.update(made)


class Member(NamedTuple):
    """A parameter of a part.

    group: the number of its group. name: in messages. compact: whether its state is. of: what it is a slice
    of in compact state.
    """

    parameter: torch.Tensor
    group: int
    name: str
    compact: bool
    of: Slice | None


class Part:
    """Parameters that are updated together, in a launch for each kind of state, and the cast plan that wants
    their amaxes.

    plan: or None. params: the masters of the plan are among them. present: as of offer_parts().

    Raises ValueError if a master of the plan is not one of the parameters.
    """

    def __init__(self, plan: StagedPlan | None = None, params: _Tensors = (), present: _Words | None = None):
        self.plan, self._present = plan, present or {}
        self._pieces = {} if plan is None else _find_pieces(plan, params)
        self._masters = locals_of(list(self._pieces))
        self.versions = self.read_versions()
        """Those of the masters when their amaxes were computed."""
        # From hold():
        self.members: list[Member] = []
        """Those with full state first."""
        self.listed: list[torch.Tensor] = []
        self.full = 0
        """How many of them have full state."""
        self.keys: list[tuple[str, ...]] = []
        """The entries of their state."""
        self._ranges: list[tuple[bool, int, int, int]] = []
        """(compact, group, first, end) of the parameters that share their kind of state and their options."""
        # From each step:
        self.params: list[torch.Tensor] = []
        """What this rank holds of the parameters."""
        self.stages: dict[bool, ops.AdamWStage] = {}
        """Of full state, and of compact state, where there are such parameters."""
        self.dtypes: list[torch.dtype] = []
        self.facts: Any = None
        """What the stages are for: dtypes of gradients, and ops.tensor_facts() of parameters and state."""
        self._passed: Any = None
        """TensorFacts.kinds of gradients and parameters that check() has looked at one by one."""

    def hold(self, members: Sequence[Member]) -> None:
        """members: ordered by group."""
        self.members = members = sorted(members, key=operator.attrgetter("compact"))
        self.listed = [m.parameter for m in members]
        kinds = [(m.compact, m.group) for m in members]
        self.full = len([m for m in members if not m.compact])
        self.keys = [tuple(_KEPT[m.compact]) for m in members]
        self._ranges = []
        for kind in dict.fromkeys(kinds):
            first = kinds.index(kind)
            self._ranges.append((*kind, first, first + kinds.count(kind)))
        self._passed, self.dtypes, self.facts = None, [torch.float32] * len(members), None

    def entries(self, states: Sequence[Mapping[str, torch.Tensor]]) -> _Tensors:
        """What the launches need of the states of the parameters, one parameter after the other."""
        found = map(_entries[False], states[: self.full]), map(_entries[True], states[self.full :])
        return locals_of(list(itertools.chain.from_iterable(itertools.chain(*found))))

    def build(self, entries: _Tensors, dtypes: list[torch.dtype]) -> None:
        """Make the stages.

        entries: what entries() returned; None where there is no state yet: such a parameter is only read.
        """
        items: dict[bool, list] = {False: [], True: []}
        rest = iter(entries)
        for (listed, _, name, compact, of), p, dtype in zip(self.members, self.params, dtypes, strict=True):
            pieces, kept = self._pieces.get(listed, ()), _KEPT[compact]
            state = list(itertools.islice(rest, len(kept)))
            _check_parameter(name, p, self.params[0].device, of)
            if pieces and pieces[0].master.data_ptr() != p.data_ptr():
                raise RuntimeError(f"{name} is not where the plan's master is: refresh() and offer it anew")
            if compact and of is None:
                _check_pieces(name, p, pieces)
            for (key, kept_as), tensor in zip(kept.items(), state, strict=True):
                if tensor is not None:
                    shape = () if key == "step" else p.shape
                    if key == "scales":
                        shape = scales_shape(p.shape) if of is None else (of.groups, 2)
                    check_buffer(f"the state of {name}: {key}", tensor, shape, kept_as, p.device)
            rest_of_item = dtype, pieces, self._present.get(listed)
            if not compact:
                item = ops.AdamWItem(p, *state, *rest_of_item)
            elif of is None:
                item = ops.CompactItem(p, None, *state, *rest_of_item)
            else:
                item = _sliced(ops.CompactItem(p, of.low, *state, *rest_of_item), of)
            items[compact].append(item)
        reduced = self.plan and self.plan.reduced
        self.stages = {kind: ops.AdamWStage(some, reduced) for kind, some in items.items() if some}

    def check(self, gradients: _Tensors) -> None:
        """Raises for the first gradient that kernels cannot read. Kinds that have passed pass again."""
        facts = ops.plain_facts(gradients)
        kinds = None if facts is None else (facts.kinds, ops.tensor_facts(self.params).kinds)
        if kinds is None or kinds != self._passed:
            _check_gradients([m.name for m in self.members], gradients, self.params)
            self._passed = kinds

    def run(self, gradients: _Tensors, options: Sequence[Any], rows: ops.RankGradients | None = None) -> None:
        """Update the parameters, and leave their amaxes in the plan.

        gradients: in the order of the parameters, with the dtypes that the stages read.
        options: what FusedAdamW._begin() returned.
        rows: gradients of all ranks, whose mean counts; `gradients` are then this rank's own.
        """
        if self.plan is not None:
            self.plan.begin_update()
        for compact, g, first, end in self._ranges:
            before = self.full if compact else 0
            self.stages[compact].begin(options[g], first - before, gradients[first:end])
        for stage in self.stages.values():
            stage.update(rows)
        # As after any update in place, a backward pass through the old values must fail.
        updated = [g is not None for g in gradients]
        ops.increment_versions(list(itertools.compress(self.params, updated)))
        if self.plan is not None:
            self.plan.end_update()
            self.versions = self.read_versions()

    def read_versions(self) -> list[int]:
        """autograd's count of writes to each master of the plan."""
        return ops.versions_of(self._masters)


def _sliced(item: ops.CompactItem, of: Slice) -> ops.CompactItem:
    """The item, with the rows of the parameter that it is a slice of."""
    pieces = item.pieces or (of.piece,)
    rows, cols = pieces[0].matrix  # of one of the matrices of a stack
    first_row = of.shard.start // (rows * cols) * rows
    return item._replace(pieces=pieces, number=of.number, first_row=first_row)


def _find_pieces(plan: StagedPlan, params: _Tensors) -> dict[torch.Tensor, tuple[ops.MasterPiece, ...]]:
    """What the plan has of each parameter that is one of its masters: one piece, or, of a weight that is a
    stack of matrices, the pieces of the matrices, which lie one behind the other.
    """
    places = {(p.data_ptr(), p.data_ptr() + p.nbytes): k for k, p in enumerate(locals_of(params))}
    pieces, found, first = plan.master_pieces(), {}, 0
    for last, piece in enumerate(pieces):
        begin, end = pieces[first].master.data_ptr(), piece.master.data_ptr() + piece.master.nbytes
        p = params[places[begin, end]] if (begin, end) in places else None
        if p is not None and piece.master.dtype == p.dtype:
            found[p] = tuple(pieces[first : last + 1])
            first = last + 1
    if first < len(pieces):
        master, shard, matrix, *_ = pieces[first]
        raise ValueError(
            f"piece {first} of the plan's masters ({master.dtype}, elements {shard.start} to {shard.end} of "
            f"a weight {list(matrix)}) is not one of the optimizer's parameters: it must have the address "
            "and length of one, and be float32"
        )
    return found


class BucketUpdate:
    """The engine's Update by a FusedAdamW whose part b has the masters of bucket b.

    inner: the optimizer of the masters. masters: by trainable parameter. exchange: of gradients.
    """

    def __init__(
        self,
        inner: FusedAdamW,
        buckets: Sequence[Bucket],
        masters: _Tensors,
        exchange: Transport,
    ):
        self._inner, self._buckets, self._exchange = inner, buckets, exchange
        self._positions = [{id(masters[i]): k for k, i in enumerate(b.indices)} for b in buckets]
        """By bucket and the id of a master: the position of its parameter in the bucket."""
        # Of one step:
        self._options: list[Any] = []
        self.present: Sequence[bool] | None = None
        """By trainable parameter, whether it is to be updated, as far as the host knows; None if all."""

    def begin(
        self,
        skip: torch.Tensor,
        *,
        present: Sequence[bool] | None = None,
        in_slices: bool = False,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Do everything of a step that can fail on this rank alone, or needs memory.

        skip, factor: float32 [] on the device, as FusedAdamW's found_inf and clip_factor.
        present: as the attribute.
        in_slices: whether the means are in the buckets' `gradients`.
        """
        if has_hooks(self._inner):
            raise RuntimeError(
                "step() of optimizer.inner has hooks and is not called, since FusedAdamW updates bucket by "
                "bucket: register them on the ZeroFP4Optimizer"
            )
        self._options, self.present = self._inner._begin(skip, factor), present
        dtypes = []
        for b, (bucket, dtype) in enumerate(zip(self._buckets, self._exchange.dtypes, strict=True)):
            if in_slices or not self._exchange.adds_in_update[b]:
                _, dtype = bucket.gradient_views, torch.float32  # which makes their memory
            dtypes.append([dtype] * len(self._inner._parts[b].listed))
        self._inner._lay_out(dtypes)

    def __call__(self, b: int, arrived: Arrived | None) -> None:
        part, bucket, present = self._inner._parts[b], self._buckets[b], self.present
        own = bucket.gradient_views if arrived is None else arrived.own
        if present is not None:
            own = [view if present[i] else None for view, i in zip(own, bucket.indices, strict=True)]
        positions = self._positions[b]
        gradients = [own[positions[id(master)]] for master in part.listed]
        part.run(gradients, self._options, None if arrived is None else arrived.rows)


# State dicts


class _AsIs:
    """A tensor in a state dict, hidden from torch, which casts all others to the dtype of their parameter."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def _shield(optimizer: FusedAdamW, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before torch loads a state dict: hide compact state, and keep each group's own choice of `state`."""
    state = {
        key: {name: _AsIs(value) if torch.is_tensor(value) else value for name, value in entries.items()}
        if isinstance(entries, Mapping) and "scales" in entries
        else entries
        for key, entries in state_dict["state"].items()
    }
    groups, own = state_dict["param_groups"], optimizer.param_groups
    if len(groups) == len(own):  # else torch raises
        groups = [group | {"state": present["state"]} for group, present in zip(groups, own, strict=True)]
    return state_dict | {"state": state, "param_groups": groups}


def _received(entries: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Entries that _shield() may have hidden, on the device."""
    return {k: v.tensor.to(device) if isinstance(v, _AsIs) else v for k, v in entries.items()}


# What FusedAdamW takes


def _check_options(options: dict[str, Any], name: str = "options", device: _Device = None) -> None:
    """Raises TypeError or ValueError for options of a group that are out of range, or that kernels cannot
    read. The value of an lr on a GPU is not looked at: the host would wait for it.

    name: of the options, in messages. device: that of the parameters, in a step.
    """
    if options["amsgrad"]:
        raise ValueError(f"{name}: amsgrad=True is not supported: use torch.optim.AdamW")
    if options["state"] not in ("full", "compact"):
        raise ValueError(f'{name}: state must be "full" or "compact", got {options["state"]!r}')
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        _check_scalar(f"{name}['lr']", lr, device, "on a GPU must be one element of float32")
        lr = 0.0
    elif isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"{name}: lr must have one element, got shape {tuple(lr.shape)}")
    if len(betas) != 2 or any(isinstance(beta, torch.Tensor) for beta in betas):
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}: betas[{i}] must be at least 0 and below 1, got {beta}")
    for key, value in (("lr", lr), ("eps", options["eps"]), ("weight_decay", options["weight_decay"])):
        if not 0.0 <= value < math.inf:
            rule = "finite" if value == math.inf else "0 or more"
            raise ValueError(f"{name}: {key} must be {rule}, got {value}")
    if device is not None and ops.is_capturing(device) and not options["capturable"]:
        raise RuntimeError(f"{name}['capturable'] must be True for step() to be captured in a CUDA graph")


def _check_scalar(name: str, scalar: Any, device: _Device, rule: str) -> None:
    """Raises TypeError or ValueError unless kernels can read one element of float32, as the rule says."""
    is_tensor = isinstance(scalar, torch.Tensor)
    if not is_tensor or scalar.dtype != torch.float32 or scalar.numel() != 1:
        found = f"{scalar.dtype} {tuple(scalar.shape)}" if is_tensor else type(scalar).__name__
        raise TypeError(f"{name} {rule}, got {found}")
    if device is not None and scalar.device != device:
        raise ValueError(f"{name} is on {scalar.device}, the parameters on {device}")
    check_plain(name, scalar)


def _check_parameter(name: str, p: torch.Tensor, device: _Device, of: Slice | None = None) -> None:
    """Raises TypeError or ValueError unless p is plain, contiguous, float32 and on the device. A slice of
    masters of 24 bits is bfloat16.
    """
    dtype = torch.float32 if of is None or of.low is None else torch.bfloat16
    if dispatches(p):
        raise TypeError(f"{name} must be a plain tensor, got {type(p).__name__}: give its float32 master")
    if p.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got layout {p.layout}")
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {p.device}")
    check_buffer(name, p, p.shape, dtype, device)


def _check_pieces(name: str, p: torch.Tensor, pieces: Sequence[ops.MasterPiece]) -> None:
    """Raises ValueError unless the rows of a parameter in compact state are those of the weight."""
    cols = p.shape[-1]
    for piece in pieces:
        if piece.matrix[1] != cols or piece.shard.start % cols:
            raise ValueError(
                f"{name} has compact state by rows of {cols} elements, and the plan takes it for elements "
                f"from {piece.shard.start} on of a weight {list(piece.matrix)}"
            )


def _check_gradients(names: Sequence[str], gradients: _Tensors, params: _Tensors) -> None:
    """Raises for the first gradient that kernels cannot read."""
    for name, gradient, p in zip(names, gradients, params, strict=True):
        if gradient is not None:
            name = f"the gradient of {name}"
            if gradient.layout != torch.strided:
                raise RuntimeError(f"{name} must be dense, got layout {gradient.layout}")
            check_plain(name, gradient)
            if gradient.dtype not in UPDATE_DTYPES:
                raise TypeError(f"{name} must be float32 or bfloat16, got {gradient.dtype}")
            check_buffer(name, gradient, p.shape, gradient.dtype, p.device)
