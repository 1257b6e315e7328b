"""AdamW in one pass over memory, which can leave the tile amaxes of FP32 masters behind for their cast."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerofp4.cast import CastPlan
from zerofp4.ops import AdamWItem, AdamWStage, RankGradients, adamw_options, is_capturing
from zerofp4.optim import fused_checks as checks
from zerofp4.optim.fused_part import Member, Part
from zerofp4.optim.local import local_of, local_state
from zerofp4.optim.param_groups import parameter_name

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""What else torch.optim.AdamW has in its groups. `fused` tells its load_state_dict where steps belong."""


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
    _parts: Sequence[Part] = ()
    _part_of: dict[torch.Tensor, int] | None = None
    """Which part a parameter is in; None where all are in the only one."""
    _captured: tuple[AdamWStage, ...] = ()
    """Those of parts that others have replaced: a CUDA graph may still be replayed."""

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

    def offer_amaxes(self, plan: CastPlan) -> None:
        """From now on every step() leaves the amaxes of the plan's masters in the plan's reduced vector, so
        that the next plan.step() need not compute them. Replaces a plan offered before.

        A master without gradient is read for it, not updated. Where masters are written between step() and
        plan.step(), call plan.begin_update(), which takes the amaxes back: amaxes_outdated() tells, and
        ZeroFP4Optimizer does it. Call offer_amaxes anew after masters have moved and the plan was refreshed.

        Raises ValueError if a master of the plan is not one of the parameters.
        """
        params = [local_of(p) for group in self.param_groups for p in group["params"]]
        self._take_parts([Part(params, plan)], None)

    def offer_parts(self, parts: Sequence[tuple[Sequence[torch.Tensor], CastPlan | None]]) -> None:
        """offer_amaxes() of several plans, each with those of all parameters that are its masters, or none:
        each part is updated in a launch of its own, in this order, and start_update() does so one by one.

        Raises ValueError as offer_amaxes() does, and where a parameter is not in exactly one part.
        """
        part_of = {p: k for k, (params, _) in enumerate(parts) for p in params}
        own = [p for group in self.param_groups for p in group["params"]]
        if sum(len(params) for params, _ in parts) != len(part_of) or part_of.keys() != set(own):
            raise ValueError(f"parts must have each of the {len(own)} parameters in exactly one of them")
        self._take_parts([Part([local_of(p) for p in params], plan) for params, plan in parts], part_of)

    def _take_parts(self, parts: Sequence[Part], part_of: dict[torch.Tensor, int] | None) -> None:
        self._captured = (*self._captured, *(stage for part in self._parts for stage in part.captured))
        self._parts, self._part_of = parts, part_of

    def amaxes_outdated(self) -> bool:
        """Whether anybody has written to a master of an offered plan after the last step(): a hook, say, or
        a subclass. Its amaxes are then not those that step() left.

        Noticed as autograd notices it: not through .data.
        """
        return any(part.is_outdated() for part in self._parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        closure: evaluated once, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {
            local_of(p): local_of(p.grad)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        update = self.start_update(gradients)
        dtypes = {p: gradient.dtype for p, gradient in gradients.items()}
        for k in range(len(self._parts)):
            update.expect(k, dtypes)
        for k in range(len(self._parts)):
            update(k, gradients)
        return loss

    def start_update(self, gradients: Mapping[torch.Tensor, torch.Tensor] | None = None) -> "Update":
        """What step() does in parts: everything is checked, and what this returns updates part k of
        offer_parts(). All parts must be updated, in any order.

        gradients: by what this rank holds of a parameter, that of its gradient. None where they are not there
        yet: then nothing about them is checked.
        """
        checks.check_scalar("found_inf", self.found_inf, self._device())
        checks.check_scalar("clip_factor", self.clip_factor, self._device())
        if not self._parts:
            self._parts = [Part((), None)]
        rows: list[list[tuple[int, int, torch.Tensor]]] = [[] for _ in self._parts]
        device = self._device()
        for g, group in enumerate(self.param_groups):
            checks.check_edited_options(g, group, device)
            params = [local_of(p) for p in group["params"]]
            if gradients is not None:
                self._check_gradients(g, params, [gradients.get(p) for p in params])
            for i, (own, p) in enumerate(zip(group["params"], params, strict=True)):
                k = 0 if self._part_of is None else self._part_of[own]
                rows[k].append((g, i, p))
        scalars = {"skip": self.found_inf, "factor": self.clip_factor}
        return Update(self, rows, [_options(group, scalars) for group in self.param_groups])

    def _check_gradients(self, g: int, params: list[torch.Tensor], gradients: list) -> None:
        bad = checks.find_unusable_gradient(gradients, params)
        if bad is not None:
            name = parameter_name(g, bad, self.param_groups[g])
            raise checks.gradient_error(name, gradients[bad], params[bad])

    def _device(self) -> torch.device | None:
        """Of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    def _bind(self, part: Part, members: list[Member]) -> None:
        """Have a stage for the members: that of the last step, unless something but gradients has moved."""
        device = self._device()
        on_gpu = device is not None and device.type == "cuda"
        capturing = on_gpu and is_capturing(device)
        if capturing:
            checks.check_capturable(self.param_groups)
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        if part.fits(members, stream, capturing):
            return
        if capturing:
            raise RuntimeError(
                "the first step() with these parameters and gradient dtypes cannot be captured in a CUDA "
                "graph: make one such step before the capture"
            )
        for member in members:
            self._check(part, member)
        part.build([_item(part, member) for member in members], members, stream)

    def _check(self, part: Part, member: Member) -> None:
        p = member.parameter
        name = parameter_name(member.group, member.position, self.param_groups[member.group])
        checks.check_parameter(name, p, self._device())
        pieces = part.pieces(p)
        if pieces and pieces[0].master.data_ptr() != p.data_ptr():
            raise RuntimeError(
                f"{name} is not where the plan's master is: refresh the plan, offer_amaxes anew"
            )
        if member.state:
            checks.check_state(name, p, member.state)


class Update:
    """A step of FusedAdamW that is taken part by part: expect(), and then a call with the gradients."""

    def __init__(self, optimizer: FusedAdamW, rows: list[list[tuple[int, int, torch.Tensor]]], options: list):
        self._optimizer, self._rows, self._options = optimizer, rows, options
        self._clips = optimizer.clip_factor is not None
        self._members: list[list[Member]] = [[] for _ in rows]
        self._expected: list[Mapping[torch.Tensor, torch.dtype] | None] = [None] * len(rows)
        self._made: list[dict[torch.Tensor, dict]] = [{} for _ in rows]  # state, until the update is taken

    def expect(self, k: int, dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
        """By parameter, what the gradients of part k will be; one without is not updated. All that the part
        needs is made here, state of a first update too, so that the call only launches.
        """
        optimizer, made = self._optimizer, self._made[k]
        part, members = optimizer._parts[k], []
        for g, i, p in self._rows[k]:
            dtype = dtypes.get(p)
            if dtype is None and not part.pieces(p):
                continue
            own = optimizer.param_groups[g]["params"][i]
            state = optimizer.state.get(own) or made.get(own)
            if not state and dtype is not None:
                state = made[own] = _initial_state(own)
            members.append(Member(g, i, p, dtype, local_state(state)))
        optimizer._bind(part, members)
        self._members[k], self._expected[k] = members, dtypes

    def __call__(
        self, k: int, gradients: Mapping[torch.Tensor, torch.Tensor], brought: RankGradients | None = None
    ) -> None:
        """Update part k. gradients: by parameter, as they were expected, else that is made up for. brought:
        those of the other ranks; then the mean of all of them counts. Raises ValueError where they are to be
        clipped, which only gradients that have been averaged are.
        """
        if brought is not None and self._clips:
            raise ValueError("clip_factor is for gradients that have been averaged, not for those of ranks")
        dtypes = {p: gradient.dtype for p, gradient in gradients.items()}
        if dtypes != self._expected[k]:
            self.expect(k, dtypes)
        members = self._members[k]
        self._optimizer.state.update(self._made[k])
        own = [gradients.get(member.parameter) for member in members]
        self._optimizer._parts[k].run(members, own, self._options, brought)


def _item(part: Part, member: Member) -> AdamWItem:
    tensors = [member.state[key] if member.state else None for key in checks.STATE]
    return AdamWItem(member.parameter, *tensors, member.dtype or torch.float32, part.pieces(member.parameter))


def _initial_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _options(group: dict[str, Any], scalars: dict[str, torch.Tensor | None]):
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    return adamw_options(**{name: group[name] for name in names}, **scalars)
