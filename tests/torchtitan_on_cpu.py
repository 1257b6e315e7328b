"""Lets torchtitan's Trainer, which asks for a GPU, train its debug model on ranks of a CPU.

Replaced are the device, attention (FlexAttention is compiled for GPUs), sums of gradients, which gloo cannot
scale, a tokenizer and data, which are not in its wheel, and a time limit that torch 2.13 cannot set.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule

_IDLE = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
torchtitan.tools.utils.device_type = "cpu"  # before other modules of torchtitan ask
torchtitan.tools.utils.device_module = types.SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: 1,
    memory_stats=lambda _: {},
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=1),
    **{name: lambda *_: None for name in _IDLE},
)

import torchtitan.trainer as trainer_of_torchtitan  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

trainer_of_torchtitan.dist_utils.set_pg_timeouts = lambda **_: None


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Of nothing: the loader has token ids."""

    def __init__(self, config: Config, **_: Any):
        super().__init__()

    def encode(self, *_: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Counting(BaseDataLoader):
    """Sequences whose tokens follow from each other; of every rank, and step, others."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Of nothing."""

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any):
        self.rank, self.shape, self.batch = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self):
        rows, columns = self.shape
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.batch)
            self.batch += 1
            first = torch.randint(64, (rows, 1), generator=generator)
            tokens = (first + 5 * torch.arange(columns)) % 64
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


def debug_config(folder: Path, steps: int, *, save_every: int | None = None) -> Any:
    """The config of torchtitan's debug model of Llama 3, which trains so many steps."""
    config = llama3_debugmodel()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Counting.Config()
    config.dump_folder, config.activation_checkpoint = str(folder), None
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 64, 4
    config.training.disable_cuda_graphs, config.debug.seed = True, 0
    config.parallelism.spmd_backend = "partial_dtensor"  # that of torch 2.13
    config.lr_scheduler.decay_ratio = 0.0  # a run that goes on later has the same rates
    config.checkpoint.enable, config.checkpoint.interval = save_every is not None, save_every or steps
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.parallelize_fn = _add_up_with_gloo(config.model_spec.parallelize_fn)
    return config


def _add_up_with_gloo(inner: Callable) -> Callable:
    @functools.wraps(inner)
    def parallelize_fn(model, **given):
        sharded = inner(model, **given)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return sharded

    return parallelize_fn


@contextlib.contextmanager
def started(config: Any, losses: list[float]) -> Iterator[trainer_of_torchtitan.Trainer]:
    """The Trainer of a config, which appends the loss of each step."""
    try:
        trainer = config.build()
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(float(loss))
        yield trainer
        trainer.close()
    finally:
        gc.enable()  # torchtitan collects when it wants to
