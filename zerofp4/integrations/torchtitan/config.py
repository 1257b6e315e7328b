"""gather_in_nvfp4 changes a run's config: when its model is prepared, and which optimizers it builds."""

import functools
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import nn

from zerofp4.integrations import fsdp2

logger = logging.getLogger(__name__)


def gather_in_nvfp4(config: Any, optimizer: str | None = None, **options: Any) -> Any:
    """Change a Trainer.Config of torchtitan so that its run gathers the weights of linear layers in NVFP4.

    config: changed in place and returned, by a function that --config names (docs/trainers.md).
    optimizer: the name that replaces "AdamW" in the groups of config.optimizer, such as "FusedAdamW" for
        zerofp4.optim.FusedAdamW. None keeps all names.
    options: filter_fn, block, columnwise and four_over_six of zerofp4.integrations.fsdp2.prepare.

    fsdp2.prepare runs on each part of the model after tensor parallelism and before fully_shard, and
    fsdp2.attach as soon as the optimizers are built. A seed checkpoint has plain weights, and every run loads
    it. CUDA graphs are switched off: a replay runs no Python to check for stale codes and cast loaded
    masters.

    The run raises ValueError for training.dtype other than "float32" and for CUDA graphs switched on again.
    """
    from zerofp4.integrations.torchtitan.optimizers import NVFP4Optimizers  # which imports torchtitan

    config.training.disable_cuda_graphs = True
    spec, old = config.model_spec, config.optimizer
    spec.parallelize_fn = _prepares(spec.parallelize_fn, options)
    config.optimizer = NVFP4Optimizers.Config(
        **{field.name: getattr(old, field.name) for field in fields(old)}
    )
    if optimizer is not None:
        for group in config.optimizer.param_groups:
            if group.optimizer_name == "AdamW":
                group.optimizer_name = optimizer
    return config


def _prepares(inner: Callable[..., nn.Module], options: dict[str, Any]) -> Callable[..., nn.Module]:
    """Have a parallelize_fn prepare after the model's parallelize(), and before fully_shard."""

    @functools.wraps(inner)
    def parallelize_fn(model: nn.Module, **given: Any) -> nn.Module:
        _check(given["training"])
        dims, backend = given["parallel_dims"], given["parallelism"].spmd_backend
        if dims.tp_enabled or dims.ep_enabled or backend != "partial_dtensor":
            model.parallelize = functools.partial(split_and_prepare, model, model.parallelize)
        else:  # models do not call parallelize(), or it changes no parameter
            prepare(model)
        sharded = inner(model, **given)
        if "parallelize" in vars(model):
            raise RuntimeError(
                f"{type(model).__name__} was sharded without a call of its parallelize(), so its weights are "
                "not prepared: gather_in_nvfp4 does not support this model with this parallelism"
            )
        return sharded

    def split_and_prepare(model: nn.Module, split: Callable[..., None], *dims: Any) -> None:
        del model.parallelize  # uncovers the method
        split(*dims)
        prepare(model)

    def prepare(model: nn.Module) -> None:
        logger.info("zerofp4: %s", fsdp2.prepare(model, **options))

    return parallelize_fn


def _check(training: Any) -> None:
    """Raises ValueError for options that the command line, or the config, has wrong."""
    if training.dtype != "float32":
        raise ValueError(
            f'training.dtype is "{training.dtype}", and masters are float32: set it to "float32", and '
            f'training.mixed_precision_param to "{training.dtype}", the dtype in which layers compute'
        )
    if not training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs is False, and a replay runs no Python: neither the check for stale "
            "codes nor the cast of a loaded checkpoint. Leave it True, as gather_in_nvfp4 sets it"
        )
