"""FusedAdamW: AdamW in one pass over memory, which also computes the tile amaxes that the next cast needs."""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from zerofp4 import ops
from zerofp4.cast import CastPlan
from zerofp4.engine import UPDATE_DTYPES, Arrived, BucketExchange
from zerofp4.optim.groups import parameter_name
from zerofp4.optim.moments import (
    KEPT,
    Slice,
    check_rows,
    converted,
    entry_shape,
    first_state,
    locals_of,
    slice_of,
    suits_compact,
)
from zerofp4.shard import Shard
from zerofp4.storage import check_buffer, check_plain, dispatches

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""Other options in groups of torch.optim.AdamW. By `fused` torch's loader puts steps on the device."""

_Tensors = Sequence[torch.Tensor | None]
_Device = torch.device | None


class FusedAdamW(torch.optim.Optimizer):
    """AdamW for float32 parameters such as master weights, all of them in one pass over memory.

    params: contiguous float32 parameters on one device, CPU or CUDA, also DTensors, as fully_shard makes
        them: each rank updates its own shard. Gradients are contiguous float32 or bfloat16.
    lr: a float, or a tensor of one element. On a GPU it must be float32, and only the kernels read it.
    betas, eps, weight_decay, maximize, capturable: as in torch.optim.AdamW. amsgrad=True raises ValueError.
    state: "full" keeps float32 moments. "compact" keeps them in 8 bits each for parameters of at least two
        dimensions with rows of at least 64 elements. A group may choose with a "state" of its own.

    Examples:
        >>> master = torch.nn.Parameter(torch.randn(64, 64))
        >>> optimizer = zerofp4.optim.FusedAdamW([master], lr=1e-3)
        >>> master.grad = torch.randn(64, 64)
        >>> optimizer.step()

    An update is reference.adamw_step or reference.compact_adamw_step with float32 masters, bit for bit on
    every device. The state of DTensors is DTensors.

    Groups and full state (step, exp_avg, exp_avg_sq) are as in torch.optim.AdamW(fused=True), and each class
    loads state dicts and distributed checkpoints of the other without amsgrad. Compact state is
    exp_avg_codes, int8, and exp_avg_sq_codes, uint8, in the shape of the parameter, and float32 scales
    (docs/numerics.md). load_state_dict() converts state of the other kind.

    step() neither synchronizes nor copies anything back. With capturable=True it can be captured in a CUDA
    graph, after a step with the same parameters and gradient dtypes; gradients may have moved since.

    Raises ValueError or TypeError for options, parameters and gradients that it does not take, before
    anything has changed.
    """

    found_inf: torch.Tensor | None = None
    """float32 of one element on the parameters' device. If it is not 0, a step changes and counts nothing.
    The kernels read it, as in torch's fused optimizers.
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
        """As torch.optim.Optimizer's. Raises the constructor's errors, and then leaves the group out."""
        chooses = "state" in param_group
        super().add_param_group(param_group)
        group, g = self.param_groups[-1], len(self.param_groups) - 1
        try:
            _check_options(group)
            if len(set(group["params"])) < len(group["params"]):  # torch warns of it
                raise ValueError(f"param_groups[{g}] has a parameter twice")
            for member in self._members_of(g):
                p = member.parameter
                device = p.device if _is_offloaded(p) else self._device()
                _check_parameter(member.name, locals_of([p])[0], device)
        except Exception:
            self.param_groups.pop()
            raise
        if not chooses:  # a checkpoint must have every option of a group, and AdamW's has no such option
            del group["state"]

    def _state_of(self, group: Mapping[str, Any]) -> str:
        """The kind of state of a group, "full" or "compact"."""
        return group.get("state", self.defaults["state"])

    def _is_compact(self, p: torch.Tensor, group: Mapping[str, Any]) -> bool:
        """Whether the state of a parameter of this group is compact."""
        return slice_of(p) is not None or (self._state_of(group) == "compact" and suits_compact(p.shape))

    def _members_of(self, g: int) -> list["Member"]:
        group, found = self.param_groups[g], []
        for i, p in enumerate(group["params"]):
            member = Member(p, g, parameter_name(g, i, group), self._is_compact(p, group))
            if member.compact:
                check_rows(member.name, p)
            found.append(member)
        return found

    def _device(self) -> _Device:
        """The device of all parameters but offloaded ones; None when there are none."""
        listed = (p for group in self.param_groups for p in group["params"])
        return next((p.device for p in listed if not _is_offloaded(p)), None)

    # State dicts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Loaded state is converted to each group's own choice of `state`."""

        def hide(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            """torch would cast compact state to the parameter's dtype."""
            pairs = given["state"].items()
            return given | {"state": {k: SimpleNamespace(**v) if "scales" in v else v for k, v in pairs}}

        hook = self.register_load_state_dict_pre_hook(hide)  # after all others, which see dicts
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state and groups from load_state_dict(), or for a copy, which has no plan."""
        if not hasattr(self, "_parts"):
            self.defaults = state["defaults"]
            self._start()
        groups, states = state["param_groups"], state["state"]
        for group, present in zip(groups, vars(self).get("param_groups", groups), strict=True):
            own = present.get("state")
            group |= present | group | _TORCH_OPTIONS | {"state": own}
            if own is None:
                del group["state"]
            _check_options(group)
            for p in filter(states.get, group["params"]):
                entries = states[p]
                if isinstance(entries, SimpleNamespace):
                    pairs = vars(entries).items()
                    entries = {name: v.to(p.device) if torch.is_tensor(v) else v for name, v in pairs}
                if slice_of(p) is None:  # else ZeroFP4Optimizer has converted it
                    entries = converted(p, entries, self._is_compact(p, group))
                step = torch.as_tensor(entries["step"], dtype=torch.float32, device=p.device)
                states[p] = entries | {"step": step}
        super().__setstate__(state)

    # Amaxes for casts

    def offer_amaxes(self, plan: CastPlan) -> None:
        """From now on every step() computes the amaxes of the plan's masters, even without a gradient, so
        that the next plan.step() need not. Replaces a plan offered before.

        If you write a master after step(), which amaxes_outdated() tells, call plan.refresh() before
        plan.step(). If masters have moved, call plan.refresh(), then offer_amaxes() again.

        Raises ValueError if a master of the plan is not one of the parameters, or shards cut blocks of 1x16.
        """
        self.offer_parts([([p for group in self.param_groups for p in group["params"]], plan)])

    def offer_parts(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], CastPlan | None]],
        present: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """offer_amaxes() for several plans. Each part is updated in its own launches, in this order.

        parts: parameters, and the plan whose masters are among them, or None. Others join the first part.
        present: by parameter, a presence flag for the kernels, float64 of one element: 0 is no gradient.
        """
        self._parts = [Part(params, plan, present or {}) for params, plan in parts]
        self._divided: list[list[Any]] | None = None
        """By group, its kind of state and the ids of its parameters, at the last _divide()."""

    def amaxes_outdated(self) -> bool:
        """Whether a master of an offered plan was written after the last step(), but not through .data."""
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
        scalars, device = {"found_inf": self.found_inf, "clip_factor": self.clip_factor}, self._device()
        for name, scalar in scalars.items():
            if scalar is not None and device is not None:  # without parameters nothing reads it
                _check_scalar(name, scalar, device)
        options = self._read_options(*scalars.values())
        gradients = locals_of(ops.gradients_of(self._listed))
        facts = ops.plain_facts(gradients)
        kinds = None if facts is None else facts.kinds
        if not self._is_laid_out(kinds):
            _check_gradients(self._members, gradients)
            self._lay_out(kinds, [None if g is None else g.dtype for g in gradients])
        for part in self._parts:
            part.run(gradients[part.span], options)
        return loss

    def begin_buckets(
        self,
        exchanges: Sequence[BucketExchange],
        skip: torch.Tensor,
        factor: torch.Tensor | None = None,
        in_slices: bool = False,
        on_host: Mapping[str, torch.Tensor | None] | None = None,
    ) -> None:
        """Begin a step of update_bucket(). Allocates all memory, and raises all errors of this rank.

        exchanges: of the buckets that have the masters, by part. skip, factor: as found_inf and clip_factor.
        in_slices: whether the means are in the buckets' `gradients`.
        on_host: skip and factor for offloaded buckets, of Offload.begin(); None without such buckets.
        """
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            raise RuntimeError(
                "step() of optimizer.inner has hooks and is not called, since FusedAdamW updates bucket by "
                "bucket: register them on the ZeroFP4Optimizer"
            )
        self._options = self._read_options(skip, factor)
        if on_host is not None:  # then the host waits for an lr on a GPU, too
            groups = [group | on_host | {"lr": float(group["lr"])} for group in self.param_groups]
            self._host_options = [ops.adamw_options(**group) for group in groups]
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
        options = self._host_options if bucket.is_offloaded else self._options
        self._part_of[exchange].run(gradients, options, rows)

    def _read_options(self, skip: torch.Tensor | None, factor: torch.Tensor | None) -> list[Any]:
        """ops.adamw_options() of each group. Gives parts their members again if the groups have changed."""
        device = self._device()
        for g, group in enumerate(self.param_groups):
            _check_options(group, f"param_groups[{g}]", device)
        divided = [[self._state_of(group), *map(id, group["params"])] for group in self.param_groups]
        if divided != self._divided:
            self._divide()
            self._divided = divided
        if device is not None and ops.is_capturing(device):
            self._captured.update(stage for part in self._parts for stage in part.stages.values())
        scalars = {"skip": skip, "factor": factor}
        return [ops.adamw_options(**group | scalars) for group in self.param_groups]

    def _divide(self) -> None:
        """Give each part its members."""
        members = {m.parameter: m for g in range(len(self.param_groups)) for m in self._members_of(g)}
        shares = [[members.pop(p) for p in part.offered if p in members] for part in self._parts]
        shares[0] += members.values()
        self._members: list[Member] = []
        for part, share in zip(self._parts, shares, strict=True):
            part.hold(share, len(self._members))
            self._members += share
        self._listed = [member.parameter for member in self._members]
        self._keys = [tuple(KEPT[member.compact]) for member in self._members]  # the entries of their state
        # The gradients' kinds and dtypes, and the facts of parameters and state, that the stages are for:
        self._layout: tuple[Any, list[torch.dtype], Any] = None, [torch.float32] * len(self._members), None

    def _facts(self) -> tuple[bytes, bytes]:
        """Addresses and kinds of parameters and state, which stages hold. Gradients may lie anywhere."""
        facts = ops.state_facts(self._listed, self.state, self._keys)
        if facts is None:  # there are DTensors: compare their local tensors
            states = [self.state.get(p) or {} for p in self._listed]
            entries = [s.get(key) for s, keys in zip(states, self._keys, strict=True) for key in keys]
            facts = ops.tensor_facts([*locals_of(self._listed), *locals_of(entries)])
        return facts

    def _is_laid_out(self, kinds: Any) -> bool:
        return kinds is not None and kinds == self._layout[0] and self._facts() == self._layout[2]

    def _lay_out(self, kinds: Any, dtypes: Sequence[torch.dtype | None]) -> None:
        """Make state for first updates, and new stages if the last ones do not fit. Changes all or nothing.

        kinds, dtypes: of the gradients; one without a dtype needs no state.
        """
        made, states = {}, []
        for (p, g, name, compact), dtype in zip(self._members, dtypes, strict=True):
            state = self.state.get(p)
            if state and not state.keys() >= KEPT[compact].keys():
                kind = self._state_of(self.param_groups[g])
                raise ValueError(
                    f"param_groups[{g}]['state'] is {kind!r} now, and that of "
                    f"{name} is not: load_state_dict() this optimizer's state_dict(), which converts it"
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
            given = list(zip(states, dtypes, strict=True))
            built = [part.build(given[part.span]) for part in self._parts]
            self.state.update(made)
            for part, own in zip(self._parts, built, strict=True):
                part.tensors, part.stages = own
        self._layout = kinds, dtypes, self._facts()


class Member(NamedTuple):
    """A parameter of a part."""

    parameter: torch.Tensor
    group: int  # its number
    name: str  # in messages
    compact: bool  # whether its state is


class Part:
    """Parameters that are updated together, in a launch for each kind of state: a bucket of ZeroFP4Optimizer.

    offered, plan, present: as in offer_parts(), with its errors.
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
        """The plan's masters when their amaxes were computed."""
        self.tensors: _Tensors = []  # the local tensors of the members
        self.stages: dict[bool, ops.AdamWStage] = {}
        """By whether state is compact, the stage that updates it."""
        self.hold([], 0)

    def hold(self, members: list[Member], first: int) -> None:
        """Take these members. first: the position of the first among those of all parts."""
        self.members, self.span = members, slice(first, first + len(members))
        self._ranges: dict[tuple[bool, int], list[int]] = {}
        """By kind of state and group, the positions of members, in the order of the stage."""
        for i, member in enumerate(members):
            self._ranges.setdefault((member.compact, member.group), []).append(i)

    def build(
        self, given: Sequence[tuple[Mapping[str, Any], torch.dtype]]
    ) -> tuple[_Tensors, dict[bool, ops.AdamWStage]]:
        """Make `tensors` and `stages`. given: by member, its state, if any, and its gradients' dtype."""
        tensors, items = locals_of([member.parameter for member in self.members]), {False: [], True: []}
        for (compact, _), positions in self._ranges.items():
            items[compact] += [self._item(self.members[i], tensors[i], *given[i]) for i in positions]
        reduced = self.plan and self.plan.reduced
        return tensors, {kind: ops.AdamWStage(some, reduced) for kind, some in items.items() if some}

    def _item(
        self, member: Member, p: torch.Tensor, state: Mapping[str, Any], dtype: torch.dtype
    ) -> ops.AdamWItem:
        """A stage's item of a parameter. Raises for memory that kernels cannot use."""
        listed, _, name, compact = member
        pieces, present = self._pieces.get(listed, ()), self._present.get(listed)
        _check_parameter(name, p, self.members[0].parameter.device)
        if pieces and pieces[0].master.data_ptr() != p.data_ptr():
            raise RuntimeError(f"{name} is not where the plan's master is: refresh() and offer it anew")
        entries = locals_of([state.get(key) for key in KEPT[compact]])
        for (key, kept_as), tensor in zip(KEPT[compact].items(), entries, strict=True):
            if tensor is not None:
                check_buffer(f"the state of {name}: {key}", tensor, entry_shape(key, p), kept_as, p.device)
        if not compact:
            return ops.AdamWItem(p, *entries, dtype, pieces, present)
        *entries, scales = entries
        if scales is not None and scales.data_ptr() % 8:
            raise ValueError(
                f"the state of {name}: scales must begin at a multiple of 8 bytes, since a GPU loads both "
                f"scales of a group at once, got address {scales.data_ptr():#x}: pass a clone()"
            )
        of = slice_of(p) or Slice(p.shape, Shard(0, p.numel()), None, 0)
        pieces = pieces or (of.piece,)
        rows, cols = pieces[0].matrix
        first_row = of.shard.start // max(1, rows * cols) * rows  # of one of the matrices of a stack
        kept = {"scales": scales, "low": of.low, "number": of.number, "first_row": first_row}
        return ops.AdamWItem(p, *entries, dtype, pieces, present, compact=True, **kept)

    def run(self, gradients: _Tensors, options: Sequence[Any], rows: ops.RankGradients | None = None) -> None:
        """Update the members, and leave their amaxes in the plan.

        gradients: of the members, with the dtypes that the stages read.
        options: ops.adamw_options() of each group.
        rows: gradients of all ranks, to average; `gradients` are then this rank's own.
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
        # A backward pass that needs the old values must fail.
        updated = map(operator.is_not, gradients, itertools.repeat(None))
        ops.increment_versions(list(itertools.compress(self.tensors, updated)))
        if self.plan is not None:
            self.plan.end_update()
            self.masters.take()


def _find_pieces(plan: CastPlan, params: _Tensors) -> dict[torch.Tensor, tuple[ops.MasterPiece, ...]]:
    """The plan's pieces of each parameter that is one of its masters: one, or those of a stack's matrices."""
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


def _is_offloaded(p: torch.Tensor) -> bool:
    """Whether it is a master of ZeroFP4Optimizer on the host, whose weight may be on a GPU."""
    return getattr(p, "zerofp4_offloaded", False)


# Checks


def _check_options(options: dict[str, Any], name: str = "options", device: _Device = None) -> None:
    """Raises TypeError or ValueError for options of a group that are out of range, or that kernels cannot
    read. Does not read an lr on a GPU, since the host would wait. device: of the parameters, in a step.
    """
    if options["amsgrad"]:
        raise ValueError(f"{name}: amsgrad=True is not supported: use torch.optim.AdamW")
    if (state := options.get("state", "full")) not in ("full", "compact"):
        raise ValueError(f'{name}: state must be "full" or "compact", got {state!r}')
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
    """Raises TypeError or ValueError unless p is plain, contiguous, on the device, and float32, or bfloat16
    as a slice of masters of 24 bits.
    """
    if dispatches(p):
        raise TypeError(f"{name} must be a plain tensor, got {type(p).__name__}: give its float32 master")
    check_plain(name, p)
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a CPU or CUDA device, got {p.device}")
    of = slice_of(p)
    dtype = torch.float32 if of is None or of.low is None else torch.bfloat16
    if dtype == torch.float32 and p.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"{name} must be a torch.float32 tensor, got {p.dtype}: zerofp4.ZeroFP4Optimizer makes float32 "
            "masters for FusedAdamW; with FSDP2 call model.float() first, before fsdp2.prepare, and give "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16) to fully_shard"
        )
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
