"""The optimizer of the masters, whose groups are those of the parameters but for what is in them."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def options(group: dict) -> dict:
    """What a group of parameters and that of their masters share."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_options(source: Sequence[dict], target: Sequence[dict]) -> None:
    for group, other in zip(source, target, strict=True):
        other.update(options(group))


def try_options(
    optimizer_class: type[torch.optim.Optimizer],
    param_groups: Sequence[dict],
    device: torch.device,
    defaults: dict,
) -> dict:
    """The optimizer's defaults, from a trial on one element per group, which finds wrong options before any
    rank has changed anything.
    """
    trials = [torch.zeros(1, dtype=torch.float32, device=device) for _ in param_groups]
    groups = [options(group) | {"params": [p]} for group, p in zip(param_groups, trials, strict=True)]
    return optimizer_class(groups, **defaults).defaults


def check_values(
    optimizer_class: type[torch.optim.Optimizer], param_groups: Sequence[dict], device: torch.device
) -> None:
    """Raises what the optimizer's constructor raises for values of options that are out of range: torch looks
    at those of the defaults only.
    """
    known = inspect.signature(optimizer_class).parameters.keys() - {"params"}
    for group in param_groups:
        trial = torch.zeros(1, dtype=torch.float32, device=device)
        optimizer_class([trial], **{key: value for key, value in group.items() if key in known})


def build_inner(
    optimizer_class: type[torch.optim.Optimizer],
    param_groups: Sequence[dict],
    masters: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
    defaults: dict,
) -> torch.optim.Optimizer:
    """The optimizer of what this rank owns.

    masters: parameters, each with this rank's part of its master or None.
    """
    master_of = {id(parameter): master for parameter, master in masters if master is not None}
    groups = [
        options(group) | {"params": [master_of[id(p)] for p in group["params"] if id(p) in master_of]}
        for group in param_groups
    ]
    return optimizer_class(groups, **defaults)


def heeds_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer leaves masters and state as they are, and counts nothing, where its
    attribute `found_inf`, float32 [] on the device, is 1: FusedAdamW, and torch's with fused=True, as their
    GradScaler relies on.

    Not with momentum: where torch's fused SGD skips its first step, its momentum buffers stay uninitialized,
    and the second step takes them for values.
    """
    if hasattr(type(optimizer), "found_inf"):
        return True
    supported = getattr(optimizer, "_step_supports_amp_scaling", False)
    groups = optimizer.param_groups
    return supported and all(group.get("fused") and not group.get("momentum") for group in groups)


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer is its class's step() and nothing else: no hooks, nor what a scheduler
    puts around the step of an optimizer that it is given.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return not any(hooks) and "step" not in vars(optimizer)


def reads_clip_factor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer multiplies gradients by its attribute `clip_factor`, and nobody looks
    at them before.
    """
    return hasattr(type(optimizer), "clip_factor") and is_plain(optimizer)


def give_gradients(masters: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]) -> None:
    """For the next step; masters without one are skipped by it.

    The masters keep them: they are the same views in every step, and to assign one costs more than to see
    that it is there.
    """
    for master, gradient in zip(masters, gradients, strict=True):
        if master is not None and master.grad is not gradient:
            master.grad = gradient


def step_masters(optimizer: torch.optim.Optimizer, **scalars: torch.Tensor | None) -> None:
    """scalars: attributes that the optimizer has in this step, such as found_inf where it heeds it; None is
    none.
    """
    with holding(optimizer, **scalars):
        optimizer.step()


@contextlib.contextmanager
def holding(optimizer: torch.optim.Optimizer, **scalars: torch.Tensor | None) -> Iterator[None]:
    """The optimizer has these attributes meanwhile, but for those that are None."""
    present = {name: scalar for name, scalar in scalars.items() if scalar is not None}
    vars(optimizer).update(present)
    try:
        yield
    finally:
        for name in present:
            delattr(optimizer, name)
