"""AdamW in one pass over memory, which can leave the tile amaxes of FP32 masters behind for their cast."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4.cast import CastPlan
from zerofp4.ops import AdamWItem, AdamWStage, Addresses, MasterPiece, adamw_options, is_capturing
from zerofp4.optim import fused_checks as checks
from zerofp4.optim.amaxes import AmaxRoute
from zerofp4.optim.local import local_of, local_state
from zerofp4.optim.parameters import parameter_name

_TORCH_OPTIONS = {"foreach": None, "differentiable": False, "fused": True, "decoupled_weight_decay": True}
"""What else torch.optim.AdamW has in its groups. `fused` tells its load_state_dict where steps belong."""


class _Member(NamedTuple):
    """A parameter that a step updates or, without a gradient, only reads for its amaxes: what this rank holds
    of it, of its gradient and of its state.
    """

    group: int
    position: int
    parameter: torch.Tensor
    gradient: torch.Tensor | None
    state: dict[str, torch.Tensor] | None


class _Layout:
    """What a stage depends on: which tensors it updates, where they are, and the dtypes of gradients. The
    addresses of gradients are no part of it: each step gives them anew.
    """

    def __init__(self, members: Sequence[_Member]):
        self._tensors, self._dtypes = _held(members), _gradient_dtypes(members)
        self._numels = list(map(torch.Tensor.numel, self._tensors))
        self._addresses = Addresses({}, {str(i): tensor for i, tensor in enumerate(self._tensors)})

    def fits(self, members: Sequence[_Member]) -> bool:
        """Looks at every address, on a GPU too: an assignment to .data of a parameter leaves no mark."""
        tensors = _held(members)
        return (
            len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
            and _gradient_dtypes(members) == self._dtypes
            and list(map(torch.Tensor.numel, tensors)) == self._numels
            and self._addresses.find_moved() is None
        )


def _held(members: Sequence[_Member]) -> list[torch.Tensor]:
    tensors = [member.parameter for member in members]
    for member in members:
        if member.state:
            tensors += [member.state[key] for key in checks.STATE]
    return tensors


def _gradient_dtypes(members: Sequence[_Member]) -> list[torch.dtype | None]:
    return [None if member.gradient is None else member.gradient.dtype for member in members]


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
    _route: AmaxRoute | None = None
    _stage: AdamWStage | None = None
    _layout: _Layout | None = None
    _stream = 0
    _captured: tuple[AdamWStage, ...] = ()

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
        self._layout = None  # it would keep the old state until the next step
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
        self._route = AmaxRoute(plan, params)
        self._layout = None

    def amaxes_outdated(self) -> bool:
        """Whether anybody has written to a master of the offered plan after the last step(): a hook, say, or
        a subclass. Its amaxes are then not those that step() left.

        Noticed as autograd notices it: not through .data.
        """
        return self._route is not None and self._route.is_outdated()

    def _pieces(self, p: torch.Tensor) -> tuple[MasterPiece, ...]:
        """What the plan that was offered has of a parameter."""
        return () if self._route is None else self._route.pieces.get(p, ())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        closure: evaluated once, with gradients enabled; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        checks.check_found_inf(self.found_inf, self._device())
        members = self._members()
        options = [_options(group, self.found_inf) for group in self.param_groups]
        self._bind(members)
        if self._route is not None:
            self._route.begin()
        self._run(members, options)
        if self._route is not None:
            self._route.end()
        return loss

    def _device(self) -> torch.device | None:
        """Of all parameters; None when there are none."""
        return next((p.device for group in self.param_groups for p in group["params"]), None)

    def _members(self) -> list[_Member]:
        """The parameters of this step in their order, once gradients and options are found to be right."""
        members, device = [], self._device()
        for g, group in enumerate(self.param_groups):
            checks.check_edited_options(g, group, device)
            params = [local_of(p) for p in group["params"]]
            gradients = [None if p.grad is None else local_of(p.grad) for p in group["params"]]
            bad = checks.find_unusable_gradient(gradients, params)
            if bad is not None:
                raise checks.gradient_error(parameter_name(g, bad, group), gradients[bad], params[bad])
            for i, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
                if gradient is not None or self._pieces(p):
                    state = local_state(self.state.get(group["params"][i]))
                    members.append(_Member(g, i, p, gradient, state))
        return members

    def _bind(self, members: list[_Member]) -> None:
        """Have a stage for the members: that of the last step, unless something but gradients has moved."""
        device = self._device()
        on_gpu = device is not None and device.type == "cuda"
        capturing = on_gpu and is_capturing(device)
        if capturing:
            checks.check_capturable(self.param_groups)
        # A stage's memory is freed in the order of the stream that it was built on.
        stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
        fits = self._layout is not None and self._layout.fits(members)
        if fits and (capturing or stream == self._stream):
            if capturing and self._stage not in self._captured:
                self._captured = (*self._captured, self._stage)  # as long as a graph may be replayed
            return
        if capturing:
            raise RuntimeError(
                "the first step() with these parameters and gradient dtypes cannot be captured in a CUDA "
                "graph: make one such step before the capture"
            )
        for member in members:
            self._check(member)
        items = [self._item(member) for member in members]
        reduced = None if self._route is None else self._route.reduced
        self._layout = None  # until there is a stage for it
        self._stage = AdamWStage(items, reduced) if items else None
        members = [member._replace(state=self._state_of(member)) for member in members]
        self._layout, self._stream = _Layout(members), stream

    def _check(self, member: _Member) -> None:
        p = member.parameter
        name = parameter_name(member.group, member.position, self.param_groups[member.group])
        checks.check_parameter(name, p, self._device())
        pieces = self._pieces(p)
        if pieces and pieces[0].master.data_ptr() != p.data_ptr():
            raise RuntimeError(
                f"{name} is not where the plan's master is: refresh the plan, offer_amaxes anew"
            )
        if member.state:
            checks.check_state(name, p, member.state)

    def _state_of(self, member: _Member) -> dict[str, torch.Tensor] | None:
        return local_state(self.state.get(self.param_groups[member.group]["params"][member.position]))

    def _item(self, member: _Member) -> AdamWItem:
        p, gradient, state = member.parameter, member.gradient, member.state
        if not state and gradient is not None:
            own = self.param_groups[member.group]["params"][member.position]
            self.state[own] = _initial_state(own)
            state = self._state_of(member)
        tensors = [state[key] if state else None for key in checks.STATE]
        dtype = torch.float32 if gradient is None else gradient.dtype
        return AdamWItem(p, *tensors, dtype, self._pieces(p))

    def _run(self, members: list[_Member], options: list) -> None:
        """options: adamw_options of each group."""
        if self._stage is None:
            return
        first = 0
        for g, some in itertools.groupby(members, lambda member: member.group):
            gradients = [member.gradient for member in some]
            self._stage.begin(options[g], first, gradients)
            first += len(gradients)
        self._stage.update()
        # As after any update in place, a backward pass through the old values must fail.
        torch.autograd.graph.increment_version([m.parameter for m in members if m.gradient is not None])


def _initial_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _options(group: dict[str, Any], skip: torch.Tensor | None):
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    return adamw_options(**{name: group[name] for name in names}, skip=skip)
