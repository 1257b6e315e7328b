"""An optimizer of masters, whose groups are those of the parameters but for what is in them."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zerofp4.optim.groups import PROCESS_GROUPS

_NOT_OPTIONS = {"params", "param_names", *PROCESS_GROUPS}


def options(group: dict) -> dict:
    """What a group of parameters and that of their masters share."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(source: Sequence[dict], target: Sequence[dict]) -> None:
    for group, other in zip(source, target, strict=True):
        other.update(options(group))


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


def give_gradients(masters: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """To each master its gradient, for the next step; those without one are skipped by it.

    The masters keep them: they are the same views in every step, and to assign one costs more than to see
    that it is there.
    """
    for master, gradient in masters:
        if master.grad is not gradient:
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
