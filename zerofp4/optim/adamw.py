"""FusedAdamW: AdamW in one pass over memory, which also computes the tile amaxes that the next cast needs."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
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
    check_rows,
    converted,
    first_state,
    locals_of,
    scales_shape,
    slice_of,
    suits_compact,
)
from zerofp4.storage import check_buffer, check_plain, dispatches

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""Other options in groups of torch.optim.AdamW. By `fused` torch's loader puts steps on the device."""

_KEPT = {False: FULL, True: COMPACT}
"""The entries of state, by whether it is compact."""

_Tensors = Sequence[torch.Tensor | None]
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
        self._captured: set[ops.AdamWStage] = set()
        """Stages that CUDA graphs have captured: a replay reads their tables."""
        FusedAdamW.offer_parts(self, [((), None)])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Raises where the constructor does, and leaves the group out then."""
        super().add_param_group(param_group)
        group, g = self.param_groups[-1], len(self.param_groups) - 1
        try:
            _check_options(group)
            if len(set(group["params"])) < len(group["params"]):  # torch warns of it
                raise ValueError(f"param_groups[{g}] has a parameter twice")
            for member in self._members_of(g):
                _check_parameter(member.name, locals_of([member.parameter])[0], self._device())
        except Exception:
            self.param_groups.pop()
            raise

    def _members_of(self, g: int) -> list["Member"]:
        group, found = self.param_groups[g], []
        for i, p in enumerate(group["params"]):
            member = Member(p, g, parameter_name(g, i, group), _is_compact(p, group))
            if member.compact:
                check_rows(member.name, p)
            found.append(member)
        return found

    def _device(self) -> _Device:
        """The device of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    # State dicts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Each group keeps its choice of `state`: loaded state of the other kind
        is encoded or decoded.
        """
        hide = self.register_load_state_dict_pre_hook(_hide_compact)  # after all others, which see dicts
        try:
            super().load_state_dict(state_dict)
        finally:
            hide.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state and groups of load_state_dict(), or of a copy, which is offered no plan."""
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
                if slice_of(p) is None:  # ZeroFP4Optimizer has converted theirs
                    entries = converted(p, entries, _is_compact(p, group))
                step = torch.as_tensor(entries["step"], dtype=torch.float32, device=p.device)
                states[p] = entries | {"step": step}
        super().__setstate__(state)

    # Amaxes for casts

    def offer_amaxes(self, plan: CastPlan) -> None:
        """From now on every step() computes the amaxes of the plan's masters, also of those without a
        gradient, so that the next plan.step() need not. Replaces a plan offered before.

        If amaxes_outdated(), since you have written a master after step(), call plan.refresh() before
        plan.step(). Call offer_amaxes() anew after masters have moved and the plan was refreshed.

        Raises ValueError if a master of the plan is not one of the parameters, or shards cut blocks of 1x16.
        """
        self.offer_parts([([p for group in self.param_groups for p in group["params"]], plan)])

    def offer_parts(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], CastPlan | None]],
        present: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """offer_amaxes() of several plans. Each part is updated in launches of its own, in this order.

        parts: parameters, and the plan whose masters are among them, or None. Others join the first part.
        present: by parameter, a presence flag, float64 of one element on its device, which the kernels read:
            0 counts as no gradient.
        """
        self._parts = [Part(params, plan, present or {}) for params, plan in parts]
        self._divided: list[list[Any]] | None = None
        """By group, its kind of state and the ids of its parameters, when the parts last got theirs."""

    def amaxes_outdated(self) -> bool:
        """Whether a master of an offered plan was written after the last step(), so that the plan's amaxes
        are outdated. A write through .data is not noticed.
        """
        return any(part.masters.written() for part in self._parts)

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
        options = self._read_options(self.found_inf, self.clip_factor)
        gradients = locals_of(ops.gradients_of(self._listed))
        facts = ops.plain_facts(gradients)
        kinds = None if facts is None else facts.kinds
        if not self._is_laid_out(kinds):
            _check_gradients(self._members, gradients)
            self._lay_out(kinds, [None if g is None else g.dtype for g in gradients])
        rest = iter(gradients)
        for part in self._parts:
            part.run(list(itertools.islice(rest, len(part.members))), options)
        return loss

    def begin_buckets(
        self,
        exchanges: Sequence[BucketExchange],
        skip: torch.Tensor,
        factor: torch.Tensor | None = None,
        in_slices: bool = False,
    ) -> None:
        """Instead of step(): begin a step in which update_bucket() updates one part after another. Does all
        that needs memory, or can fail on this rank alone.

        exchanges: by part, of the bucket that has its masters.
        skip, factor: float32 [] on the device, as found_inf and clip_factor.
        in_slices: whether the means are in the buckets' `gradients`.
        """
        if has_hooks(self):
            raise RuntimeError(
                "step() of optimizer.inner has hooks and is not called, since FusedAdamW updates bucket by "
                "bucket: register them on the ZeroFP4Optimizer"
            )
        self._options = self._read_options(skip, factor)
        self._part_of = dict(zip(exchanges, self._parts, strict=True))
        dtypes: list[torch.dtype] = []
        for exchange, part in self._part_of.items():
            dtype = exchange.arrives_as
            if in_slices or dtype is None:
                _, dtype = exchange.bucket.gradients, torch.float32  # which makes their memory
            dtypes += [dtype] * len(part.members)
        if not self._is_laid_out(dtypes):
            self._lay_out(dtypes, dtypes)

    def update_bucket(self, exchange: BucketExchange, arrived: Arrived | None) -> None:
        """Update the masters of a bucket: the engine's Update."""
        bucket, present = exchange.bucket, exchange.present or itertools.repeat(True)
        own, rows = (bucket.gradient_views, None) if arrived is None else arrived
        known = zip(own, present, bucket.shards, strict=False)
        gradients = [g if is_there else None for g, is_there, shard in known if shard.numel]
        self._part_of[exchange].run(gradients, self._options, rows)

    def _read_options(self, found_inf: torch.Tensor | None, clip_factor: torch.Tensor | None) -> list[Any]:
        """ops.adamw_options() of each group. Divides the parameters anew if the groups have changed."""
        device = self._device()
        scalars = {"skip": found_inf, "factor": clip_factor}
        for name, scalar in (("found_inf", found_inf), ("clip_factor", clip_factor)):
            if scalar is not None and device is not None:  # without parameters nothing reads it
                _check_scalar(name, scalar, device)
        for g, group in enumerate(self.param_groups):
            _check_options(group, f"param_groups[{g}]", device)
        divided = [[group["state"], *map(id, group["params"])] for group in self.param_groups]
        if divided != self._divided:
            self._divide()
            self._divided = divided
        if device is not None and ops.is_capturing(device):
            self._captured.update(stage for part in self._parts for stage in part.stages.values())
        return [ops.adamw_options(**group | scalars) for group in self.param_groups]

    def _divide(self) -> None:
        """Give each part its members."""
        every = [self._members_of(g) for g in range(len(self.param_groups))]
        members = {member.parameter: member for member in itertools.chain.from_iterable(every)}
        shares = [[members.pop(p) for p in part.offered if p in members] for part in self._parts]
        shares[0] += members.values()
        for part, share in zip(self._parts, shares, strict=True):
            part.hold(share)
        self._members = list(itertools.chain.from_iterable(shares))
        self._listed = [member.parameter for member in self._members]
        self._keys = [tuple(_KEPT[member.compact]) for member in self._members]
        """The entries of their state."""
        self._layout: tuple[Any, list[torch.dtype], Any] = None, [torch.float32] * len(self._members), None
        """The gradients' kinds and dtypes, and the facts of parameters and state, that the stages are for."""

    def _facts(self) -> tuple[bytes, bytes]:
        """Addresses and kinds of parameters and state. A stage holds these addresses, and an assignment to
        .data leaves no other mark, so every step compares them. Gradients may lie anywhere.
        """
        facts = ops.state_facts(self._listed, self.state, self._keys)
        if facts is None:  # there are DTensors, whose local tensors count
            states = [self.state.get(p) or {} for p in self._listed]
            entries = [s.get(key) for s, keys in zip(states, self._keys, strict=True) for key in keys]
            facts = ops.tensor_facts([*locals_of(self._listed), *locals_of(entries)])
        return facts

    def _is_laid_out(self, kinds: Any) -> bool:
        return kinds is not None and kinds == self._layout[0] and self._facts() == self._layout[2]

    def _lay_out(self, kinds: Any, dtypes: Sequence[torch.dtype | None]) -> None:
        """Make state of first updates, and stages unless the last ones will do. Changes all or nothing.

        kinds: as of _is_laid_out(). dtypes: of the gradients of all members; None needs no state.
        """
        made, states = {}, []
        for member, dtype in zip(self._members, dtypes, strict=True):
            p, compact, state = member.parameter, member.compact, self.state.get(member.parameter)
            if state and not state.keys() >= _KEPT[compact].keys():
                group = f"param_groups[{member.group}]['state']"
                raise ValueError(
                    f"{group} is {self.param_groups[member.group]['state']!r} now, and that of {member.name} "
                    "is not: load_state_dict() this optimizer's state_dict(), which converts it"
                )
            if not state and dtype is not None:
                state = made[p] = first_state(p, compact)
            states.append(state or {})
        dtypes = [new or old for new, old in zip(dtypes, self._layout[1], strict=True)]
        if made or (dtypes, self._facts()) != self._layout[1:]:
            if self._listed and ops.is_capturing(self._listed[0].device):
                raise RuntimeError(
                    "the first step() with these parameters and gradient dtypes cannot be captured in a CUDA "
                    "graph: make one such step before the capture"
                )
            rest = zip(states, dtypes, strict=True)
            stages = [part.build(list(itertools.islice(rest, len(part.members)))) for part in self._parts]
            self.state.update(made)
            for part, own in zip(self._parts, stages, strict=True):
                part.stages = own
        self._layout = kinds, dtypes, self._facts()


class Member(NamedTuple):
    """A parameter of a part.

    group: the number of its group. name: in messages. compact: whether its state is.
    """

    parameter: torch.Tensor
    group: int
    name: str
    compact: bool


class Part:
    """Parameters that are updated together, in a launch for each kind of state: a bucket of ZeroFP4Optimizer.

    offered, plan, present: as of offer_parts(), with its errors.
    """

    def __init__(
        self,
        offered: Sequence[torch.Tensor],
        plan: CastPlan | None,
        present: Mapping[torch.Tensor, torch.Tensor],
    ):
        self.offered, self.plan, self._present = offered, plan, present
        self._pieces = {} if plan is None else _find_pieces(plan, offered)
        self.masters = ops.Versions(locals_of(list(self._pieces)))
        """Those of the plan, as they were when their amaxes were computed."""
        self.hold([])
        self.stages: dict[bool, ops.AdamWStage] = {}
        """Of full state, and of compact state, if there are such parameters."""

    def hold(self, members: list[Member]) -> None:
        self.members = members
        self._ranges: dict[tuple[bool, int], list[int]] = {}
        """By kind of state and group, the positions of members, as they follow one another in a stage."""
        self._listed = [member.parameter for member in members]
        for i, member in enumerate(members):
            self._ranges.setdefault((member.compact, member.group), []).append(i)

    def build(self, given: Sequence[tuple[Mapping[str, Any], torch.dtype]]) -> dict[bool, ops.AdamWStage]:
        """`stages` for these states and dtypes of gradients. A state may be empty: such a parameter is only
        read.
        """
        params, items = locals_of(self._listed), {False: [], True: []}
        for (compact, _), positions in self._ranges.items():
            items[compact] += [self._item(self.members[i], params[i], *given[i]) for i in positions]
        reduced = self.plan and self.plan.reduced
        return {kind: ops.AdamWStage(some, reduced) for kind, some in items.items() if some}

    def _item(
        self, member: Member, p: torch.Tensor, state: Mapping[str, Any], dtype: torch.dtype
    ) -> ops.AdamWItem:
        """A stage's item of a parameter. Raises for memory that kernels cannot use."""
        listed, _, name, compact = member
        pieces, present, of = self._pieces.get(listed, ()), self._present.get(listed), slice_of(p)
        _check_parameter(name, p, self.members[0].parameter.device)
        if pieces and pieces[0].master.data_ptr() != p.data_ptr():
            raise RuntimeError(f"{name} is not where the plan's master is: refresh() and offer it anew")
        shapes = {"step": ()}
        if compact:
            shapes["scales"] = scales_shape(p.shape) if of is None else (of.groups, 2)
        entries = locals_of([state.get(key) for key in _KEPT[compact]])
        for (key, kept_as), tensor in zip(_KEPT[compact].items(), entries, strict=True):
            if tensor is not None:
                what = f"the state of {name}: {key}"
                check_buffer(what, tensor, shapes.get(key, p.shape), kept_as, p.device)
        if not compact:
            return ops.AdamWItem(p, *entries, dtype, pieces, present)
        *entries, scales = entries
        if scales is not None and scales.data_ptr() % 8:
            raise ValueError(
                f"the state of {name}: scales must begin at a multiple of 8 bytes, since a GPU loads both "
                f"scales of a group at once, got address {scales.data_ptr():#x}: pass a clone()"
            )
        item = ops.AdamWItem(p, *entries, dtype, pieces, present, compact=True, scales=scales)
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
        """Update the members, and leave their amaxes in the plan.

        gradients: of the members, with the dtypes that the stages read.
        options: ops.adamw_options() of each group.
        rows: gradients of all ranks, whose mean counts; `gradients` are then this rank's own.
        """
        if self.plan is not None:
            self.plan.begin_update()
        firsts = {False: 0, True: 0}
        for (compact, g), positions in self._ranges.items():
            own = list(map(gradients.__getitem__, positions))
            self.stages[compact].begin(options[g], firsts[compact], own)
            firsts[compact] += len(own)
        for stage in self.stages.values():
            stage.update(rows)
        # As after any update in place, a backward pass through the old values must fail.
        updated = map(operator.is_not, gradients, itertools.repeat(None))
        ops.increment_versions(list(itertools.compress(locals_of(self._listed), updated)))
        if self.plan is not None:
            self.plan.end_update()
            self.masters.take()


def _find_pieces(plan: CastPlan, params: _Tensors) -> dict[torch.Tensor, tuple[ops.MasterPiece, ...]]:
    """The plan's pieces of each parameter that is one of its masters: one, or one for each matrix of a stack,
    which lie one behind the other.
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


def _is_compact(p: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter of this group is compact."""
    return slice_of(p) is not None or (group["state"] == "compact" and suits_compact(p.shape))


# Checks


def _check_options(options: dict[str, Any], name: str = "options", device: _Device = None) -> None:
    """Raises TypeError or ValueError for options of a group that are out of range, or that kernels cannot
    read. Does not read an lr on a GPU, for which the host would wait.

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


def _check_parameter(name: str, p: torch.Tensor, device: torch.device) -> None:
    """Raises TypeError or ValueError unless p is plain, contiguous, float32 and on the device. A slice of
    masters of 24 bits is bfloat16.
    """
    if dispatches(p):
        raise TypeError(f"{name} must be a plain tensor, got {type(p).__name__}: give its float32 master")
    check_plain(name, p)
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {p.device}")
    of = slice_of(p)
    dtype = torch.float32 if of is None or of.low is None else torch.bfloat16
    check_buffer(name, p, p.shape, dtype, device)


def _check_gradients(members: Sequence[Member], gradients: _Tensors) -> None:
    """Raises TypeError, ValueError or RuntimeError for the first gradient that kernels cannot read."""
    for member, gradient in zip(members, gradients, strict=True):
        if gradient is not None:
            name, p = f"the gradient of {member.name}", locals_of([member.parameter])[0]
            check_plain(name, gradient)
            if gradient.dtype not in UPDATE_DTYPES:
                raise TypeError(f"{name} must be float32 or bfloat16, got {gradient.dtype}")
            check_buffer(name, gradient, p.shape, gradient.dtype, p.device)
