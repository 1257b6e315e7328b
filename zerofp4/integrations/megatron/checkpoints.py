"""NVFP4 weights in Megatron's distributed checkpoints, which hold values: of the weights, and the masters."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.distributed import Stage
from zerofp4.tensors import NVFP4Tensor


def make_preprocess(original: Callable, nested_values: Callable[[Any], Iterable]) -> Callable:
    """original: what Megatron begins to save, or to load, a sharded state dict with."""

    @functools.wraps(original)
    def preprocess(sharded_state_dict, *args, **kwargs):
        """The entries get the weights' values in place of the weights, as for an ordinary parameter."""
        for entry in nested_values(sharded_state_dict):
            if isinstance(getattr(entry, "data", None), NVFP4Tensor):
                entry.data = entry.data.detach().dequantize()
        return original(sharded_state_dict, *args, **kwargs)

    return preprocess


def make_load(original: Callable, has_masters: Callable[[Any], bool] = lambda state: True) -> Callable:
    """original: what loads the state of an optimizer, or a file with masters."""

    @functools.wraps(original)
    def load(self, state_dict, *args, **kwargs):
        """Weights follow the masters that were loaded, if any were: quantizing the weights of a checkpoint,
        which were quantized before, would give other bytes.
        """
        original(self, state_dict, *args, **kwargs)
        if has_masters(state_dict):
            _cast_masters(self)

    return load


@torch.no_grad()
def _cast_masters(optimizer: Any) -> None:
    """Cast the masters of a DistributedOptimizer and gather the codes, as a step does. Collective."""
    if optimizer.is_stub_optimizer or optimizer.ddp_config.use_megatron_fsdp:
        return
    weights, masters, start_offsets = optimizer._get_nvfp4_params_and_shard_fp32_from_nvfp4()
    if not any(isinstance(weight, NVFP4Tensor) for weight in weights):
        return
    from megatron.core import fp4_utils, fp8_utils

    group = optimizer.data_parallel_group
    fp4_utils.quantize_nvfp4_param_shard(weights, masters, start_offsets, group)
    for bucket in (b for buffer in optimizer.buffers if buffer.has_nvfp4_params for b in buffer.buckets):
        own = bucket.param_data.chunk(group.size())[group.rank()]
        with Stage("gathering weights", group):
            dist.all_gather_into_tensor(bucket.param_data, own, group=group)
    fp8_utils.post_all_gather_processing(weights)
