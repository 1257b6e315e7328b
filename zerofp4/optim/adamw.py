"""AdamW in one pass over memory, which can leave the tile amaxes of FP32 masters behind for their cast."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerofp4.cast import CastPlan
from zerofp4.engine import Arrived, ArrivingMeans, FlatBuffer, Transport
from zerofp4.ops import (
    AdamWItem,
    AdamWStage,
    Addresses,
    MasterPiece,
    RankGradients,
    adamw_options,
    is_capturing,
)
from zerofp4.optim import adamw_checks as checks
from zerofp4.optim.param_groups import parameter_name

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""What else torch.optim.AdamW has in its groups. `fused` tells its load_state_dict where steps belong."""

_PLAIN = {torch.Tensor, nn.Parameter}


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for float32 parameters such as master weights, in one pass over memory for them all.

    lr: a float, or a tensor of one element, which the kernels read where it is when it is on the GPU (then
    float32). betas, eps, weight_decay, maximize, capturable: as in torch.optim.AdamW. amsgrad=True raises
    ValueError.

    Parameters are contiguous float32 on one device, CPU or CUDA; gradients contiguous float32 or bfloat16. Of
    DTensors, as fully_shard makes them, every rank updates what it holds, and state has DTensors too. An
    update is reference.adamw_step, bit for bit on every device. state, param_groups and state_dict are those
    of torch.optim.AdamW(fused=True), and each loads what the other saved (but not amsgrad).

    step() neither synchronizes nor copies anything back. With capturable=True it can be captured in a CUDA
    graph, after a step with the same parameters and gradient dtypes; gradients may lie elsewhere by then.

    Raises ValueError or TypeError for options out of range and for parameters and gradients other than these,
    RuntimeError for sparse gradients, before anything has changed.
    """

    found_inf: torch.Tensor | None = None
    """float32 of one element on the parameters' device: where it is not 0, a step leaves parameters and state
    as they are, and counts nothing. Read by the kernels, as torch's fused optimizers read theirs.
    """

    clip_factor: torch.Tensor | None = None
    """float32 of one element on the parameters' device: what a step multiplies gradients by as it reads them,
    in float32. Gradients themselves stay as they are.
    """

    # On the class: neither pickled nor part of a state dict.
    _parts: Sequence["Part"] = ()
    _part_of: dict[torch.Tensor, int] | None = None
    """By parameter, the part that updates it; None where one part updates all."""
    _assigned: Sequence[torch.Tensor] = ()
    """The parameters of all groups when they were last assigned to parts."""
    _sizes: Sequence[int] = ()
    """The number of parameters in each group at that time."""
    _options: Sequence[Any] = ()
    """By group, of the present step."""
    _captured: tuple[AdamWStage, ...] = ()
    """Stages of replaced parts: a CUDA graph may still be replayed."""

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
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        checks.check_options(options)
        super().__init__(params, options | {"maximize": maximize, "capturable": capturable} | _TORCH_OPTIONS)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's. Raises where the constructor does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            checks.check_options(group)
            seen: set[torch.Tensor] = set()
            for i, p in enumerate(group["params"]):
                name = parameter_name(len(self.param_groups) - 1, i, group)
                checks.check_parameter(name, local_of(p), self._device())
                if p in seen:
                    raise ValueError(f"{name} is in the group twice")
                seen.add(p)
        except Exception:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            checks.check_amsgrad(group)
        checks.check_loaded(state["state"].values())
        super().__setstate__(state)
        for part in self._parts:  # they would keep the old state until the next step
            part.forget()
        for group in self.param_groups:
            group.update(_TORCH_OPTIONS)
            for p in group["params"]:
                entries = self.state.get(p)
                if entries:  # a step counted on the CPU or in a Python number comes to the parameter
                    entries["step"] = torch.as_tensor(entries["step"], dtype=torch.float32, device=p.device)

    def _device(self) -> torch.device | None:
        """Of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    # Amaxes for casts

    def offer_amaxes(self, plan: CastPlan) -> None:
        """From now on every step() leaves the amaxes of the plan's masters in the plan's reduced vector, so
        that the next plan.step() need not compute them. Replaces a plan offered before.

        A master without gradient is read for it, not updated. Where masters are written between step() and
        plan.step(), call plan.begin_update(), which takes the amaxes back: amaxes_outdated() tells, and
        ZeroFP4Optimizer does it. Call offer_amaxes anew after masters have moved and the plan was refreshed.

        Raises ValueError if a master of the plan is not one of the parameters.
        """
        params = [local_of(p) for group in self.param_groups for p in group["params"]]
        self._take_parts([Part(AmaxRoute(plan, params))], None)

    def offer_parts(
        self,
        parts: Sequence[tuple[Sequence[torch.Tensor], CastPlan | None]],
        present: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """offer_amaxes() of several plans, each with those of all parameters that are its masters, or none:
        each part is updated in a launch of its own, in this order.

        present: by parameter, float64 of one element on its device: where it is 0, the parameter counts as
        one without gradient. Read by the kernels.

        Raises ValueError as offer_amaxes() does, and where a parameter is not in exactly one part.
        """
        part_of = {p: k for k, (params, _) in enumerate(parts) for p in params}
        own = [p for group in self.param_groups for p in group["params"]]
        if sum(len(params) for params, _ in parts) != len(part_of) or part_of.keys() != set(own):
            raise ValueError(f"parts must have each of the {len(own)} parameters in exactly one of them")
        routes = [plan and AmaxRoute(plan, list(map(local_of, params))) for params, plan in parts]
        self._take_parts([Part(route, present) for route in routes], part_of)

    def _take_parts(self, parts: Sequence["Part"], part_of: dict[torch.Tensor, int] | None) -> None:
        self._captured = (*self._captured, *(stage for part in self._parts for stage in part.captured))
        self._parts, self._part_of, self._assigned = parts, part_of, ()

    def amaxes_outdated(self) -> bool:
        """Whether anybody has written to a master of an offered plan after the last step(): a hook, say, or
        a subclass. Its amaxes are then not those that step() left.

        Noticed as autograd notices it: not through .data.
        """
        return any(part.route is not None and part.route.is_outdated() for part in self._parts)

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
        self.begin(self.found_inf, self.clip_factor)
        gradients = [[local_of(p.grad) for p in part.listed] for part in self._parts]
        for part, own in zip(self._parts, gradients, strict=True):
            self._check_gradients(part, own)
        for k, own in enumerate(gradients):
            self.expect(k, [None if gradient is None else gradient.dtype for gradient in own])
        for k, own in enumerate(gradients):
            self.update(k, own)
        return loss

    def begin(self, found_inf: torch.Tensor | None, clip_factor: torch.Tensor | None) -> None:
        """Check the options and assign parameters to parts; expect() and update() of every part follow.

        found_inf, clip_factor: as the attributes.
        """
        device = self._device()
        checks.check_scalar("found_inf", found_inf, device)
        checks.check_scalar("clip_factor", clip_factor, device)
        self._assign()
        options, scalars = [], {"skip": found_inf, "factor": clip_factor}
        for g, group in enumerate(self.param_groups):
            checks.check_edited_options(g, group, device)
            names = ("lr", "betas", "eps", "weight_decay", "maximize")
            options.append(adamw_options(**{name: group[name] for name in names}, **scalars))
        self._options, self._clips = options, clip_factor is not None

    def expect(self, k: int, dtypes: Sequence[torch.dtype | None]) -> None:
        """Make all that part k needs, so that update() only launches: state of a first update too.

        dtypes: of gradients, in the order of the part's parameters; one with None needs no state.
        """
        part, device = self._parts[k], self._device()
        capturing = device is not None and is_capturing(device)
        if capturing:
            checks.check_capturable(self.param_groups)
        states = list(map(self.state.get, part.listed))
        made = {}
        for i, (dtype, state) in enumerate(zip(dtypes, states, strict=True)):
            if dtype is not None and not state:
                made[part.listed[i]] = states[i] = _initial_state(part.listed[i])
        stream = torch.cuda.current_stream(device).cuda_stream if part.params and device.type == "cuda" else 0
        dtypes = [dtype or before for dtype, before in zip(dtypes, part.dtypes, strict=True)]
        if not part.fits(states, dtypes, stream, capturing):
            if capturing:
                raise RuntimeError(
                    "the first step() with these parameters and gradient dtypes cannot be captured in a CUDA "
                    "graph: make one such step before the capture"
                )
            for i, state in enumerate(states):
                self._check_member(part, i, state)
            part.build(states, dtypes, stream)
        self.state.update(made)

    def update(
        self, k: int, gradients: Sequence[torch.Tensor | None], rows: RankGradients | None = None
    ) -> None:
        """Update part k.

        gradients: in the order of its parameters, with the dtypes that were expected.
        rows: those of all ranks; then the mean counts, and `gradients` are this rank's own.

        Raises ValueError for rows that are to be clipped: only averaged gradients are.
        """
        if rows is not None and self._clips:
            raise ValueError("clip_factor is for gradients that have been averaged, not for those of ranks")
        self._parts[k].run(gradients, self._options, rows)

    def _assign(self) -> None:
        """Give each part its parameters, in the order of the groups, where these are not those of the last
        step.
        """
        own = [p for group in self.param_groups for p in group["params"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        if self._parts and sizes == self._sizes and all(map(operator.is_, own, self._assigned)):
            if len(own) == len(self._assigned):
                return
        self._parts = self._parts or [Part()]
        members: list[list[tuple[int, int, torch.Tensor]]] = [[] for _ in self._parts]
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                members[0 if self._part_of is None else self._part_of[p]].append((g, i, p))
        for part, some in zip(self._parts, members, strict=True):
            part.hold(some)
        self._assigned, self._sizes = own, sizes

    def _check_gradients(self, part: "Part", gradients: Sequence[torch.Tensor | None]) -> None:
        bad = checks.find_unusable_gradient(gradients, part.params)
        if bad is not None:
            raise checks.gradient_error(self._name(part, bad), gradients[bad], part.params[bad])

    def _check_member(self, part: "Part", i: int, state: dict[str, torch.Tensor] | None) -> None:
        name, p = self._name(part, i), part.params[i]
        checks.check_parameter(name, p, self._device())
        pieces = part.pieces(p)
        if pieces and pieces[0].master.data_ptr() != p.data_ptr():
            raise RuntimeError(
                f"{name} is not where the plan's master is: refresh the plan, offer_amaxes anew"
            )
        if state:
            checks.check_state(name, p, {key: local_of(value) for key, value in state.items()})

    def _name(self, part: "Part", i: int) -> str:
        g, position = part.positions[i]
        return parameter_name(g, position, self.param_groups[g])


class Part:
    """Parameters that one launch updates.

    route: to the plan that wants their amaxes.
    present: as of FusedAdamW.offer_parts().
    """

    def __init__(
        self, route: "AmaxRoute | None" = None, present: Mapping[torch.Tensor, torch.Tensor] | None = None
    ):
        self.route, self._present = route, present or {}
        self.listed: list[torch.Tensor] = []
        """The parameters as groups list them, ordered by group."""
        self.params: list[torch.Tensor] = []
        """What this rank holds of them."""
        self.positions: list[tuple[int, int]] = []
        """The group of each, and its position there."""
        self._ranges: list[tuple[int, int, int]] = []
        """(group, first, end) of the parameters that share their options."""
        self.stage: AdamWStage | None = None
        self.dtypes: list[torch.dtype] = []
        """Of the gradients that the stage reads."""
        self._tensors: list[torch.Tensor] = []
        """What the stage updates: parameters, then their state."""
        self._numels: list[int] = []
        self._addresses: Addresses | None = None
        self._stream = 0
        self.captured: tuple[AdamWStage, ...] = ()
        """What CUDA graphs that were captured read and write, as long as one may be replayed."""

    def hold(self, members: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        """members: (group, position there, parameter), ordered by group."""
        self.listed = [p for _, _, p in members]
        self.params = list(map(local_of, self.listed))
        self.positions = [(g, i) for g, i, _ in members]
        groups = [g for g, _, _ in members]
        self._ranges = [(g, groups.index(g), groups.index(g) + groups.count(g)) for g in sorted(set(groups))]
        self.dtypes = [torch.float32] * len(members)
        self.forget()

    def pieces(self, p: torch.Tensor) -> tuple[MasterPiece, ...]:
        """What the plan has of a parameter."""
        return () if self.route is None else self.route.pieces.get(p, ())

    def forget(self) -> None:
        """The next step takes all addresses anew."""
        self._addresses, self._tensors = None, []

    def fits(
        self,
        states: Sequence[dict[str, torch.Tensor] | None],
        dtypes: Sequence[torch.dtype],
        stream: int,
        capturing: bool,
    ) -> bool:
        """Whether the stage of the last step will do. Where gradients lie does not matter. A stage's memory
        is freed in the order of the stream that it was built on.

        Looks at every address, on a GPU too: an assignment to .data of a parameter leaves no mark.
        """
        tensors = self._held(states)
        found = (
            self._addresses is not None
            and len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
            and dtypes == self.dtypes
            and list(map(torch.Tensor.numel, tensors)) == self._numels
            and self._addresses.find_moved() is None
            and (capturing or stream == self._stream)
        )
        if found and capturing and self.stage not in self.captured:
            self.captured = (*self.captured, self.stage)
        return found

    def _held(self, states: Sequence[dict[str, torch.Tensor] | None]) -> list[torch.Tensor]:
        tensors = list(self.params)
        for key in checks.STATE:
            tensors += [state[key] for state in states if state]
        return tensors if set(map(type, tensors)) <= _PLAIN else list(map(local_of, tensors))

    def build(
        self, states: Sequence[dict[str, torch.Tensor] | None], dtypes: list[torch.dtype], stream: int
    ) -> None:
        """Make a stage for all parameters; those without state are only read."""
        self.forget()  # until there is a stage for it
        items = [
            AdamWItem(
                p,
                *(local_of(state[key]) if state else None for key in checks.STATE),
                dtype,
                self.pieces(p),
                self._present.get(p),
            )
            for p, state, dtype in zip(self.params, states, dtypes, strict=True)
        ]
        self.stage = AdamWStage(items, self.route and self.route.plan.reduced) if items else None
        tensors = self._held(states)
        self._addresses = Addresses({}, {str(i): tensor for i, tensor in enumerate(tensors)})
        self._tensors, self._numels = tensors, list(map(torch.Tensor.numel, tensors))
        self.dtypes, self._stream = dtypes, stream

    def run(
        self,
        gradients: Sequence[torch.Tensor | None],
        options: Sequence[Any],
        rows: RankGradients | None = None,
    ) -> None:
        """gradients, rows: as of FusedAdamW.update(). options: adamw_options of each group."""
        if self.route is not None:
            self.route.plan.begin_update()
        if self.stage is not None:
            for g, first, end in self._ranges:
                self.stage.begin(options[g], first, gradients[first:end])
            self.stage.update(rows)
        # As after any update in place, a backward pass through the old values must fail.
        torch.autograd.graph.increment_version(
            [p for p, gradient in zip(self.params, gradients, strict=True) if gradient is not None]
        )
        if self.route is not None:
            self.route.end()


class AmaxRoute:
    """Which masters of a plan are parameters of an optimizer, whose update leaves their amaxes.

    pieces: what the plan has of each parameter that is one of its masters, by parameter: one piece, or, of a
    weight that is a stack of matrices, those of the matrices, one behind the other.

    Raises ValueError if a master of the plan is not one of the parameters.
    """

    def __init__(self, plan: CastPlan, parameters: Sequence[torch.Tensor]):
        by_place = {(p.data_ptr(), p.numel()): p for p in parameters}
        self.plan = plan
        self.pieces: dict[torch.Tensor, tuple[MasterPiece, ...]] = {}
        found: list[MasterPiece] = []  # of a master, the first ones
        for i, piece in enumerate(plan.master_pieces()):
            if piece.master.dtype != torch.float32 or (found and _end(found[-1]) != piece.master.data_ptr()):
                raise _missing_master(i - len(found), (found or [piece])[0])
            found.append(piece)
            numel = sum(part.master.numel() for part in found)
            p = by_place.get((found[0].master.data_ptr(), numel))
            if p is not None:
                self.pieces[p] = tuple(found)
                found = []
        if found:
            raise _missing_master(len(plan.master_pieces()) - len(found), found[0])
        # A tensor and its views have one version counter: masters in one buffer are asked once.
        bases = [p if p._base is None else p._base for p in self.pieces]
        self.counted = tuple({id(base): base for base in bases}.values())
        self._versions = self._counts()

    def end(self) -> None:
        """The update has left the amaxes."""
        self.plan.end_update()
        self._versions = self._counts()

    def is_outdated(self) -> bool:
        """Whether anybody has written to a master since end(). Noticed as autograd notices it: not through
        .data.
        """
        return self._versions != self._counts()

    def _counts(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.counted)


def _end(piece: MasterPiece) -> int:
    """The address behind its master."""
    return piece.master.data_ptr() + piece.master.nbytes


def _missing_master(i: int, piece: MasterPiece) -> ValueError:
    first, last = piece.shard.start, piece.shard.end
    return ValueError(
        f"plan.master_pieces()[{i}].master ({piece.master.dtype}, elements {first} to {last} of a weight "
        f"{list(piece.matrix)}) is not one of the optimizer's parameters: it must have the address and "
        "length of one, and be float32"
    )


def local_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The plain tensor whose memory it is: of a DTensor this rank's own, of one that stands for a master (as
    those that zerofp4.integrations.fsdp2 makes do) that master; any other tensor itself.
    """
    while tensor is not None and type(tensor) not in _PLAIN:
        inside = getattr(tensor, "_local_tensor", None)
        if inside is None:
            inside = getattr(tensor, "zerofp4_master", None)
        if inside is None:
            break
        tensor = inside
    return tensor


def _initial_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class BucketUpdate:
    """The engine's Update by a FusedAdamW whose part b has the masters of bucket b.

    inner: the optimizer of the masters.
    buckets, masters: the masters, by trainable parameter.
    exchange: of gradients.
    """

    def __init__(
        self,
        inner: FusedAdamW,
        buckets: Sequence[FlatBuffer],
        masters: Sequence[torch.Tensor | None],
        exchange: Transport | ArrivingMeans,
    ):
        self._inner, self._buckets, self._exchange = inner, buckets, exchange
        part_of = {
            master: (g, i)
            for g, group in enumerate(inner.param_groups)
            for i, master in enumerate(group["params"])
        }
        self._members = [
            sorted(
                ((k, i) for k, i in enumerate(bucket.indices) if masters[i] is not None),
                key=lambda member: part_of[masters[member[1]]],
            )
            for bucket in buckets
        ]
        """By bucket, in the order of the part: the position of a parameter in the bucket, and among all."""
        self._adds = [False] * len(buckets)
        self._present: Sequence[bool] = ()

    def begin(
        self, *, present: Sequence[bool], in_slices: bool, factor: torch.Tensor | None, skip: torch.Tensor
    ) -> None:
        """Do everything of a step that can fail on this rank alone.

        present: by trainable parameter, whether it is to be updated, as far as the host knows.
        in_slices: whether the means are in the buckets' `gradients`.
        factor, skip: float32 [] on the device, as FusedAdamW's clip_factor and found_inf.
        """
        self._inner.begin(skip, factor)
        self._present = present
        exchange = self._exchange
        for b, (bucket, dtype) in enumerate(zip(self._buckets, exchange.dtypes, strict=True)):
            adds = not in_slices and exchange.adds_in_update[b] and dtype in checks.GRADIENT_DTYPES
            self._adds[b] = adds
            if not adds:
                _ = bucket.gradient_views  # makes their memory
            self._inner.expect(b, [dtype if adds else torch.float32] * len(self._members[b]))

    def adds(self, b: int) -> bool:
        return self._adds[b]

    def __call__(self, b: int, arrived: Arrived | None) -> None:
        own = self._buckets[b].gradient_views if arrived is None else arrived.own
        gradients = [own[k] if self._present[i] else None for k, i in self._members[b]]
        self._inner.update(b, gradients, None if arrived is None else arrived.rows)
