"""Where packed codes lie in Megatron's parameter buffer, and which options it does not support for them."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from zerofp4.storage import called
from zerofp4.tensors import NVFP4Tensor


def compute_packed_layout(
    self, original: Callable, is_packed: Callable[[Any], bool], params_with_names: Sequence[tuple[Any, str]]
) -> None:
    """The layout of gradients and masters, halved: a rank casts the elements of its slice of each bucket, and
    gathers the same slice of the bucket of bytes. So buckets have a multiple of 2 * ranks elements
    (compute_buffer_layout). Raises ValueError for options that do not work with our weights.

    is_packed: whether Megatron considers a parameter to be in NVFP4, ours or TransformerEngine's.
    """
    params = [param for param, _ in params_with_names]
    ours = [(param, name) for param, name in params_with_names if isinstance(param, NVFP4Tensor)]
    if not all(map(is_packed, params)):
        if ours:
            raise ValueError(f"{ours[0][1]}: weights in NVFP4 and in FP8 cannot share a buffer")
        return original(self, params_with_names)
    for param, name in ours:
        _check_config(self.ddp_config, param, name)
    whole = 2 * self.data_parallel_world_size if self.ddp_config.use_distributed_optimizer else 2
    bounds = [bound for start, end, _ in self.param_index_map.values() for bound in (start, end)]
    bad = [end for _, end in self.bucket_indices if end % whole] + [b for b in bounds if b % 2]
    if bad:
        raise ValueError(
            f"a parameter or bucket that begins or ends at element {bad[0]} does not have whole bytes on "
            f"each of {self.data_parallel_world_size} ranks: was the layout made before install()?"
        )
    self.nvfp4_packed_param_index_map = {
        param: (start // 2, end // 2, bucket) for param, (start, end, bucket) in self.param_index_map.items()
    }
    self.nvfp4_packed_bucket_indices = [(start // 2, end // 2) for start, end in self.bucket_indices]
    last = {bucket: end for _, end, bucket in sorted(self.param_index_map.values(), key=lambda at: at[1])}
    starts = [start for start, _ in self.bucket_indices]
    self.nvfp4_packed_numel_unpadded = sum((last[b] - start) // 2 for b, start in enumerate(starts))


def compute_buffer_layout(
    original: Callable, is_packed: Callable, params, bucket_size, data_parallel_world_size, *args, **kwargs
) -> Any:
    """Pads buckets of NVFP4 weights as for twice the ranks, so that a slice has whole bytes."""
    shards = data_parallel_world_size * (2 if any(map(is_packed, params)) else 1)
    layout = original(params, bucket_size, shards, *args, **kwargs)
    if hasattr(layout, "num_optimizer_shards"):
        layout = dataclasses.replace(layout, num_optimizer_shards=data_parallel_world_size)
    return layout


def _check_config(ddp_config: Any, param: NVFP4Tensor, name: str) -> None:
    wanted = {"use_distributed_optimizer": True, "fp4_param_gather": True, "fp8_param_gather": False}
    for option, value in wanted.items():
        if getattr(ddp_config, option) != value:
            raise ValueError(
                f"{name}: weights in NVFP4 need DistributedDataParallelConfig({option}={value}), or nothing "
                "would cast them"
            )
    if getattr(ddp_config, "num_distributed_optimizer_instances", 1) != 1:
        raise ValueError(
            f"{name}: several instances of the distributed optimizer do not take weights in NVFP4"
        )
    if getattr(param, "is_managed_by_layer_wise_optimizer", False):
        raise ValueError(
            f"{name}: LayerWiseDistributedOptimizer (Muon) gathers weights in bf16, not in NVFP4"
        )


def construct(self, original: Callable, *args, **kwargs) -> None:
    """The constructor of DistributedOptimizer. Raises ValueError if masters would not be made or cast."""
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    buffers = itertools.chain.from_iterable(given["per_model_buffers"].values())
    for param in (p for buffer in buffers for p in buffer.params if isinstance(p, NVFP4Tensor)):
        _check_masters(given["config"], param)
    original(self, *args, **kwargs)


def _check_masters(config: Any, param: NVFP4Tensor) -> None:
    for option in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(config, option, False):
            raise ValueError(
                f"OptimizerConfig({option}=True) keeps the masters of {called('a weight', param)} "
                "where they cannot be cast to NVFP4: leave it out"
            )
    if param.get_high_precision_init_val() is None:
        raise ValueError(
            f"{called('a weight', param)} has no initial value for its master: an optimizer had it "
            "before, or its codes were written since convert_model (broadcast_params)"
        )


def construct_fsdp(self, original: Callable, config, ddp_config, module, *args, **kwargs) -> None:
    """The constructor of Megatron-FSDP."""
    held = [name for name, param in module.named_parameters() if isinstance(param, NVFP4Tensor)]
    if held:
        raise NotImplementedError(
            f"Megatron-FSDP cannot shard {held[0]}, a weight in NVFP4: use DistributedDataParallel"
        )
    original(self, config, ddp_config, module, *args, **kwargs)
