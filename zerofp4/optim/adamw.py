"""FusedAdamW: AdamW in one pass over memory, which also computes the tile amaxes that the next cast needs."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4 import ops
from zerofp4.cast import CastPlan
from zerofp4.engine import UPDATE_DTYPES, Arrived, BucketExchange
from zerofp4.optim.groups import parameter_name
from zerofp4.optim.inner import has_hooks
from zerofp4.optim.moments import (
    COMPACT,
    FULL,
    Slice,
    check_rows,
    converted,
    first_state,
    locals_of,
    scales_shape,
    suits_compact,
)
from zerofp4.storage import check_buffer, check_plain, dispatches

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""What else torch.optim.AdamW has in its groups. By `fused` torch's loader puts steps on the device."""

_KEPT = {False: FULL, True: COMPACT}
"""The entries of state, by whether it is compact."""

_Tensors = Sequence[torch.Tensor | None]
_Dtypes = Sequence[torch.dtype | None]
_Device = torch.device | None
_Words = Mapping[torch.Tensor, torch.Tensor]


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
    parameters and gradients than these.
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
        self._start()
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        options |= {"maximize": maximize, "capturable": capturable, "state": state}
        super().__init__(params, options | _TORCH_OPTIONS)

    def _start(self) -> None:
        self._slices: dict[torch.Tensor, Slice] = {}
        """By parameter, what it is a slice of: those of ZeroFP4Optimizer that are kept in compact state."""
        self._captured: set[ops.AdamWStage] = set()
        """What CUDA graphs have captured: a replay reads its tables."""
        FusedAdamW.offer_parts(self, [((), None)])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Raises where the constructor does, and leaves the group out then."""
        param_group = dict(param_group)
        slices = param_group.pop("slices", {})  # of ZeroFP4Optimizer
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1, slices)
        except Exception:
            self.param_groups.pop()
            raise
        self._slices |= slices

    def _check_group(self, g: int, slices: Mapping[torch.Tensor, Slice]) -> None:
        group = self.param_groups[g]
        _check_options(group)
        if len(set(group["params"])) < len(group["params"]):  # torch warns of it
            raise ValueError(f"param_groups[{g}] has a parameter twice")
        for i, (p, local) in enumerate(zip(group["params"], locals_of(group["params"]), strict=True)):
            name = parameter_name(g, i, group)
            _check_parameter(name, local, self._device(), slices.get(p))
            if self._is_compact(p, group):
                check_rows(name, p)

    def _device(self) -> _Device:
        """The device of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    def _is_compact(self, p: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the state of a parameter of this group is compact."""
        return p in self._slices or (group["state"] == "compact" and suits_compact(p.shape))

    # State dicts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Each group keeps its own choice of `state`: full state is encoded, or
        compact state decoded, where this optimizer keeps the other kind.
        """
        hide = self.register_load_state_dict_pre_hook(_hide_compact)  # behind all others, which see dicts
        try:
            super().load_state_dict(state_dict)
        finally:
            hide.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state and groups from load_state_dict(), or those of a copy, which is offered no plan."""
        if not hasattr(self, "_parts"):
            self._start()
        groups, states = state["param_groups"], state["state"]
        for group, present in zip(groups, vars(self).get("param_groups", groups), strict=True):
            group |= present | group | _TORCH_OPTIONS | {"state": present["state"]}
            _check_options(group)
            for p in filter(states.get, group["params"]):
                entries = states[p]
                if isinstance(entries, _AsIs):
                    entries = {
                        name: value.to(p.device) if torch.is_tensor(value) else value
                        for name, value in entries.entries.items()
                    }
                if p not in self._slices:  # ZeroFP4Optimizer has converted theirs
                    entries = converted(p, entries, self._is_compact(p, group))
                step = torch.as_tensor(entries["step"], dtype=torch.float32, device=p.device)
                states[p] = entries | {"step": step}
        super().__setstate__(state)

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
        self.offer_parts([([p for group in self.param_groups for p in group["params"]], plan)])

    def offer_parts(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], CastPlan | None]],
        present: _Words | None = None,
    ) -> None:
        """offer_amaxes() of several plans: each part is updated in a launch of its own, in this order.

        parts: parameters, and the plan whose masters are among them, or None. Parameters that are in none
            join the first.
        present: by parameter, float64 of one element on its device, which the kernels read. Where it is 0,
            the parameter counts as one without gradient.
        """
        self._parts = [Part(plan, params, present or {}) for params, plan in parts]
        self._part_of = {p: k for k, (params, _) in enumerate(parts) for p in params}
        self._assigned: list[list[Any]] | None = None
        """By group, its kind of state and the ids of the parameters when the parts last got theirs."""
        self._listed: list[torch.Tensor] = []
        """The parameters of all parts, one after another."""
        self._keys: list[tuple[str, ...]] = []
        """The entries of their state."""
        self._laid_out: Any = None
        """The kinds of gradients and ops.state_facts() that the parts are laid out for."""
        self._passed: Any = None
        """The kinds of gradients and parameters that were last looked at one by one."""

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
        gradients = [locals_of(ops.gradients_of(part.listed)) for part in self._parts]
        facts = ops.plain_facts(list(itertools.chain.from_iterable(gradients)))
        kinds = None if facts is None else facts.kinds
        if not self._is_laid_out(kinds):
            passing = kinds, [ops.tensor_facts(part.params).kinds for part in self._parts]
            if kinds is None or passing != self._passed:
                for part, own in zip(self._parts, gradients, strict=True):
                    _check_gradients(part.members, own, part.params)
                self._passed = passing
            self._lay_out(kinds, [[None if g is None else g.dtype for g in own] for own in gradients])
        for part, own in zip(self._parts, gradients, strict=True):
            part.run(own, options)
        return loss

    def _begin(self, found_inf: torch.Tensor | None, clip_factor: torch.Tensor | None) -> list[Any]:
        """Check the options, and give the parts their parameters. Returns ops.adamw_options of each group."""
        device = self._device()
        scalars = {"skip": found_inf, "factor": clip_factor}
        for name, scalar in (("found_inf", found_inf), ("clip_factor", clip_factor)):
            if scalar is not None and device is not None:  # without parameters nothing reads it
                _check_scalar(name, scalar, device)
        for g, group in enumerate(self.param_groups):
            _check_options(group, f"param_groups[{g}]", device)
        ids = [[group["state"], *map(id, group["params"])] for group in self.param_groups]
        if ids != self._assigned:
            members: list[list[Member]] = [[] for _ in self._parts]
            for g, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"]):
                    is_compact, name = self._is_compact(p, group), parameter_name(g, i, group)
                    kept = self.state.get(p)
                    if kept and not kept.keys() >= _KEPT[is_compact].keys():
                        raise ValueError(
                            f"param_groups[{g}]['state'] is {group['state']!r} now, and that of {name} is "
                            "not: load_state_dict() this optimizer's state_dict(), which converts it"
                        )
                    if is_compact:
                        check_rows(name, p)
                    member = Member(p, g, name, is_compact, self._slices.get(p))
                    members[self._part_of.get(p, 0)].append(member)
            for part, own in zip(self._parts, members, strict=True):
                part.hold(own)
            self._listed = list(itertools.chain.from_iterable(part.listed for part in self._parts))
            self._keys = list(itertools.chain.from_iterable(part.keys for part in self._parts))
            self._assigned, self._laid_out, self._passed = ids, None, None
        for part in self._parts:
            if part.params is not part.listed:  # a DTensor may hold another tensor than before
                part.params = locals_of(part.listed)
        if device is not None and ops.is_capturing(device):
            self._captured.update(stage for part in self._parts for stage in part.stages.values())
        return [ops.adamw_options(**group | scalars) for group in self.param_groups]

    def _is_laid_out(self, kinds: Any) -> bool:
        """Whether parameters and state are where they were when gradients of these kinds were laid out.

        A stage holds addresses, so every step compares them all, on a GPU too: an assignment to .data of a
        parameter leaves no other mark. Where gradients lie does not matter.
        """
        facts = ops.state_facts(self._listed, self.state, self._keys)
        return kinds is not None and facts is not None and (kinds, facts) == self._laid_out

    def _lay_out(self, kinds: Any, dtypes: Sequence[_Dtypes]) -> None:
        """Make all that part.run() needs: state of first updates, and stages unless the last ones will do.

        kinds: what _is_laid_out() compares. dtypes: by part, of gradients in the order of its parameters; one
        with None needs no state.
        """
        self._laid_out = None  # an error may leave some parts with other stages
        by_id = dict(zip(map(id, self.state), self.state.values(), strict=True))  # torch hashes in Python
        made = {}
        for part, own in zip(self._parts, dtypes, strict=True):
            made |= part.lay_out([by_id.get(id(p)) for p in part.listed], own)
        self.state.update(made)
        self._laid_out = kinds, ops.state_facts(self._listed, self.state, self._keys)


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

    def __init__(self, plan: CastPlan | None, params: _Tensors, present: _Words):
        self.plan, self._present = plan, present
        self._pieces = {} if plan is None else _find_pieces(plan, params)
        self._masters = locals_of(list(self._pieces))
        self.versions = self.read_versions()
        """Those of the masters when their amaxes were computed."""
        # From hold():
        self.members: list[Member] = []
        """Those with full state first."""
        self.listed: list[torch.Tensor] = []
        self.keys: list[tuple[str, ...]] = []
        """The entries of their state."""
        self._ranges: list[tuple[bool, int, int, slice]] = []
        """By kind of state and group: both, the number of the first item in its stage, and which members."""
        self.params: _Tensors = []
        """What this rank holds of the parameters: `listed` itself where they are plain."""
        # From each step:
        self.stages: dict[bool, ops.AdamWStage] = {}
        """Of full state, and of compact state, where there are such parameters."""
        self._built_for: Any = None
        """dtypes of gradients, and ops.tensor_facts() of parameters and state."""

    def hold(self, members: Sequence[Member]) -> None:
        """members: ordered by group."""
        self.members = members = sorted(members, key=operator.attrgetter("compact"))
        self.listed = [m.parameter for m in members]
        self.params = locals_of(self.listed)
        self.keys = [tuple(_KEPT[m.compact]) for m in members]
        kinds, self._ranges, begins = [(m.compact, m.group) for m in members], [], {}
        for kind in dict.fromkeys(kinds):
            first, count = kinds.index(kind), kinds.count(kind)
            begin = begins.setdefault(kind[0], first)
            self._ranges.append((*kind, first - begin, slice(first, first + count)))
        self._built_for = None

    def lay_out(self, states: list[Mapping[str, Any] | None], dtypes: _Dtypes) -> dict[torch.Tensor, Any]:
        """Build the stages, unless they are built for this. Returns the state of first updates.

        states: of the parameters; None or empty where there is none. dtypes: of gradients.
        """
        made = {}
        if not all(states):
            for i, (p, _, _, compact, of) in enumerate(self.members):
                if not states[i] and dtypes[i] is None:
                    states[i] = dict.fromkeys(self.keys[i])
                elif not states[i]:
                    states[i] = made[p] = first_state(p, compact, of)
        items = zip(states, self.keys, strict=True)
        entries = locals_of([state[key] for state, keys in items for key in keys])
        before = self._built_for[0] if self._built_for else [torch.float32] * len(dtypes)
        dtypes = [new or old for new, old in zip(dtypes, before, strict=True)]
        built_for = dtypes, ops.tensor_facts([*self.params, *entries])
        if built_for != self._built_for:
            if self.params and ops.is_capturing(self.params[0].device):
                raise RuntimeError(
                    "the first step() with these parameters and gradient dtypes cannot be captured in a CUDA "
                    "graph: make one such step before the capture"
                )
            self._build(iter(entries), dtypes)
            self._built_for = built_for
        return made

    def _build(self, entries: Iterator[torch.Tensor | None], dtypes: Sequence[torch.dtype]) -> None:
        """Make the stages.

        entries: those of the states, one parameter after the other; None where there is no state yet: such a
        parameter is only read.
        """
        items: dict[bool, list] = {False: [], True: []}
        for member, p, dtype, keys in zip(self.members, self.params, dtypes, self.keys, strict=True):
            state = list(itertools.islice(entries, len(keys)))
            items[member.compact].append(self._item(member, p, state, dtype))
        reduced = self.plan and self.plan.reduced
        self.stages = {kind: ops.AdamWStage(some, reduced) for kind, some in items.items() if some}

    def _item(self, member: Member, p: torch.Tensor, state: _Tensors, dtype: torch.dtype) -> ops.AdamWItem:
        """What a stage has of a parameter. Raises where its memory is not what kernels take it for."""
        listed, _, name, compact, of = member
        pieces, present = self._pieces.get(listed, ()), self._present.get(listed)
        _check_parameter(name, p, self.params[0].device, of)
        if pieces and pieces[0].master.data_ptr() != p.data_ptr():
            raise RuntimeError(f"{name} is not where the plan's master is: refresh() and offer it anew")
        shapes = {"step": ()}
        if compact:
            shapes["scales"] = scales_shape(p.shape) if of is None else (of.groups, 2)
        for (key, kept_as), tensor in zip(_KEPT[compact].items(), state, strict=True):
            if tensor is not None:
                what = f"the state of {name}: {key}"
                check_buffer(what, tensor, shapes.get(key, p.shape), kept_as, p.device)
        if not compact:
            return ops.AdamWItem(p, *state, dtype, pieces, present)
        *state, scales = state
        if scales is not None and scales.data_ptr() % 8:
            raise ValueError(
                f"the state of {name}: scales must begin at a multiple of 8 bytes, since a GPU loads both "
                f"scales of a group at once, got address {scales.data_ptr():#x}: pass a clone()"
            )
        item = ops.AdamWItem(p, *state, dtype, pieces, present, compact=True, scales=scales)
        if of is None:
            cols = p.shape[-1]
            if any(piece.matrix[1] != cols or piece.shard.start % cols for piece in pieces):
                raise ValueError(f"{name} has compact state by rows of {cols}, which the weight has not")
            return item
        pieces = pieces or (of.piece,)
        rows, cols = pieces[0].matrix
        first_row = of.shard.start // (rows * cols) * rows  # of one of the matrices of a stack
        return item._replace(pieces=pieces, low=of.low, number=of.number, first_row=first_row)

    def run(self, gradients: _Tensors, options: Sequence[Any], rows: ops.RankGradients | None = None) -> None:
        """Update the parameters, and leave their amaxes in the plan.

        gradients: in the order of the parameters, with the dtypes that the stages read.
        options: what FusedAdamW._begin() returned.
        rows: gradients of all ranks, whose mean counts; `gradients` are then this rank's own.
        """
        if self.plan is not None:
            self.plan.begin_update()
        for compact, g, first, members in self._ranges:
            self.stages[compact].begin(options[g], first, gradients[members])
        for stage in self.stages.values():
            stage.update(rows)
        # As after any update in place, a backward pass through the old values must fail.
        updated = map(operator.is_not, gradients, itertools.repeat(None))
        ops.increment_versions(list(itertools.compress(self.params, updated)))
        if self.plan is not None:
            self.plan.end_update()
            self.versions = self.read_versions()

    def read_versions(self) -> list[int]:
        """autograd's count of writes to each master of the plan."""
        return ops.versions_of(self._masters)


def _find_pieces(plan: CastPlan, params: _Tensors) -> dict[torch.Tensor, tuple[ops.MasterPiece, ...]]:
    """What the plan has of each parameter that is one of its masters: one piece, or, of a weight that is a
    stack of matrices, the pieces of the matrices, which lie one behind the other.
    """
    places = {(p.data_ptr(), p.data_ptr() + p.nbytes): k for k, p in enumerate(locals_of(params))}
    pieces, found, first = plan.master_pieces(), {}, 0
    for last, piece in enumerate(pieces):
        begin, end = pieces[first].master.data_ptr(), piece.master.data_ptr() + piece.master.nbytes
        if (begin, end) in places:
            found[params[places[begin, end]]] = tuple(pieces[first : last + 1])
            first = last + 1
    if first < len(pieces):
        raise ValueError(
            f"piece {first} of the plan's masters is not one of the optimizer's parameters: it must have the "
            "address and length of one"
        )
    return found


class BucketUpdate:
    """The engine's Update by a FusedAdamW whose parts have the masters of these buckets, in their order.

    inner: the optimizer of the masters. masters: by trainable parameter.
    """

    def __init__(self, inner: FusedAdamW, masters: _Tensors, exchanges: Sequence[BucketExchange]):
        self._inner, self._masters, self._exchanges = inner, masters, exchanges
        self._numbers = {exchange: n for n, exchange in enumerate(exchanges)}
        self._orders: list[tuple[Sequence[torch.Tensor], list[int]]] = [([], [])] * len(exchanges)
        """By bucket, the parameters of its part, and their positions in the bucket."""
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
        for n, exchange in enumerate(self._exchanges):
            bucket, listed = exchange.bucket, self._inner._parts[n].listed
            if listed is not self._orders[n][0]:
                positions = {id(self._masters[i]): k for k, i in enumerate(bucket.indices)}
                self._orders[n] = listed, [positions[id(master)] for master in listed]
            dtype = bucket.sent_as
            if in_slices or not exchange.averages_in_update:
                _, dtype = bucket.gradient_views, torch.float32  # which makes their memory
            dtypes.append([dtype] * len(listed))
        if not self._inner._is_laid_out(dtypes):
            self._inner._lay_out(dtypes, dtypes)

    def __call__(self, exchange: BucketExchange, arrived: Arrived | None) -> None:
        bucket, present, n = exchange.bucket, self.present, self._numbers[exchange]
        own = bucket.gradient_views if arrived is None else arrived.own
        if present is not None:
            own = [view if present[i] else None for view, i in zip(own, bucket.indices, strict=True)]
        gradients = list(map(own.__getitem__, self._orders[n][1]))
        self._inner._parts[n].run(gradients, self._options, None if arrived is None else arrived.rows)


@dataclasses.dataclass
class _AsIs:
    """Compact state in a state dict, hidden from torch, which casts tensors to the dtype of a parameter."""

    entries: dict[str, Any]


def _hide_compact(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Prepare a state dict for torch's load_state_dict."""
    states = {
        key: _AsIs(entries) if "scales" in entries else entries
        for key, entries in state_dict["state"].items()
    }
    return state_dict | {"state": states}


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
        _check_scalar(f"{name}['lr']", lr, device or lr.device)
        lr = 0.0
    are_tensors = (isinstance(beta, torch.Tensor) for beta in betas)  # the host would wait for a GPU
    if any(are_tensors) or len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers of at least 0 and below 1, got {betas!r}")
    for key, value in (("lr", lr), ("eps", options["eps"]), ("weight_decay", options["weight_decay"])):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: {key} must be finite and 0 or more, got {value}")
    if device is not None and ops.is_capturing(device) and not options["capturable"]:
        raise RuntimeError(f"{name}['capturable'] must be True for step() to be captured in a CUDA graph")


def _check_scalar(name: str, scalar: Any, device: torch.device) -> None:
    """Raises TypeError or ValueError unless it is one element of float32 on the device."""
    shape = scalar.shape if isinstance(scalar, torch.Tensor) and scalar.numel() == 1 else ()
    check_buffer(name, scalar, shape, torch.float32, device)


def _check_parameter(name: str, p: torch.Tensor, device: torch.device, of: Slice | None) -> None:
    """Raises TypeError or ValueError unless p is plain, contiguous, float32 and on the device. A slice of
    masters of 24 bits is bfloat16.
    """
    if dispatches(p):
        raise TypeError(f"{name} must be a plain tensor, got {type(p).__name__}: give its float32 master")
    check_plain(name, p)
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {p.device}")
    dtype = torch.float32 if of is None or of.low is None else torch.bfloat16
    check_buffer(name, p, p.shape, dtype, device)


def _check_gradients(members: Sequence[Member], gradients: _Tensors, params: _Tensors) -> None:
    """Raises TypeError, ValueError or RuntimeError for the first gradient that kernels cannot read."""
    for member, gradient, p in zip(members, gradients, params, strict=True):
        if gradient is not None:
            name = f"the gradient of {member.name}"
            check_plain(name, gradient)
            if gradient.dtype not in UPDATE_DTYPES:
                raise TypeError(f"{name} must be float32 or bfloat16, got {gradient.dtype}")
            check_buffer(name, gradient, p.shape, gradient.dtype, p.device)
