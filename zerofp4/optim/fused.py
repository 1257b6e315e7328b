"""AdamW in one pass over memory, which can leave the tile amaxes of FP32 masters behind for their cast."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from zerofp4.cast import CastPlan
from zerofp4.ops import AdamWItem, RankGradients, adamw_options, is_capturing
from zerofp4.optim import fused_checks as checks
from zerofp4.optim.fused_part import Member, Part
from zerofp4.optim.local import local_of, local_state
from zerofp4.optim.parameters import parameter_name

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

    # On the class: neither pickled nor part of a state dict.
    _parts: Sequence[Part] = ()
    _part_of: dict[torch.Tensor, int] | None = None
    """Which part a parameter is in; None where all are in the only one."""

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
        self._parts = [Part(params, plan)]
        self._part_of = None

    def offer_parts(self, parts: Sequence[tuple[Sequence[torch.Tensor], CastPlan | None]]) -> None:
        """offer_amaxes() of several plans, each with those of all parameters that are its masters, or none:
        each part is updated in a launch of its own, in this order, and start_update() does so one by one.

        Raises ValueError as offer_amaxes() does, and where a parameter is not in exactly one part.
        """
        part_of = {p: k for k, (params, _) in enumerate(parts) for p in params}
        own = [p for group in self.param_groups for p in group["params"]]
        if sum(len(params) for params, _ in parts) != len(part_of) or part_of.keys() != set(own):
            raise ValueError(f"parts must have each of the {len(own)} parameters in exactly one of them")
        self._parts = [Part([local_of(p) for p in params], plan) for params, plan in parts]
        self._part_of = part_of

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
        update = self.start_update()
        for k in range(len(self._parts)):
            update(k)
        return loss

    def start_update(self, brought: Collection[int] = ()) -> "Update":
        """What step() does in parts: everything is checked, and the function that this returns updates part k
        of offer_parts(). All parts must be updated, in any order.

        brought: parts whose gradients will come with Update.add_up(); those that their parameters have are
        not looked at.
        """
        checks.check_found_inf(self.found_inf, self._device())
        if not self._parts:
            self._parts = [Part((), None)]
        members = self._members(brought)
        return Update(self, members, [_options(group, self.found_inf) for group in self.param_groups])

    def _device(self) -> torch.device | None:
        """Of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    def _members(self, brought: Collection[int]) -> list[list[Member]]:
        """The parameters of this step by part, in their order, once gradients and options are found to be
        right; all of the parts in `brought`, without gradients.
        """
        members: list[list[Member]] = [[] for _ in self._parts]
        device = self._device()
        for g, group in enumerate(self.param_groups):
            checks.check_edited_options(g, group, device)
            params = [local_of(p) for p in group["params"]]
            part_of = [0 if self._part_of is None else self._part_of[p] for p in group["params"]]
            gradients = [
                None if k in brought or p.grad is None else local_of(p.grad)
                for k, p in zip(part_of, group["params"], strict=True)
            ]
            bad = checks.find_unusable_gradient(gradients, params)
            if bad is not None:
                raise checks.gradient_error(parameter_name(g, bad, group), gradients[bad], params[bad])
            for i, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
                k = part_of[i]
                if gradient is not None or k in brought or self._parts[k].pieces(p):
                    state = local_state(self.state.get(group["params"][i]))
                    members[k].append(Member(g, i, p, gradient, state))
        return members

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
        items = [self._item(part, member) for member in members]
        members = [member._replace(state=self._state_of(member)) for member in members]
        part.build(items, members, stream)

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

    def _state_of(self, member: Member) -> dict[str, torch.Tensor] | None:
        return local_state(self.state.get(self.param_groups[member.group]["params"][member.position]))

    def _item(self, part: Part, member: Member) -> AdamWItem:
        p, gradient, state = member.parameter, member.gradient, member.state
        if not state and gradient is not None:
            own = self.param_groups[member.group]["params"][member.position]
            self.state[own] = _initial_state(own)
            state = self._state_of(member)
        tensors = [state[key] if state else None for key in checks.STATE]
        dtype = torch.float32 if gradient is None else gradient.dtype
        return AdamWItem(p, *tensors, dtype, part.pieces(p))


class Update:
    """A step of FusedAdamW that is taken part by part."""

    def __init__(self, optimizer: FusedAdamW, members: list[list[Member]], options: list):
        self._optimizer, self._members, self._options = optimizer, members, options

    def __call__(self, k: int) -> None:
        self._run(k, self._members[k], None)

    def add_up(self, k: int, brought: RankGradients, own: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Part k with the mean of what the ranks have brought.

        own: by parameter, this rank's gradient, contiguous, of the dtype of the others'; without one it is
        not updated.
        """
        part, members = self._optimizer._parts[k], []
        for m in self._members[k]:
            gradient = own.get(m.parameter)
            if gradient is not None or part.pieces(m.parameter):
                members.append(m._replace(gradient=gradient))
        self._run(k, members, brought)

    def _run(self, k: int, members: list[Member], brought: RankGradients | None) -> None:
        part = self._optimizer._parts[k]
        self._optimizer._bind(part, members)
        part.run(members, self._options, brought)


def _initial_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _options(group: dict[str, Any], skip: torch.Tensor | None):
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    return adamw_options(**{name: group[name] for name in names}, skip=skip)
