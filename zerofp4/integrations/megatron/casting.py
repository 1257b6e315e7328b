"""Replacements of TransformerEngine's functions, for our weights: codes in Megatron's buffer, the cast of its
shards, columnwise copies. Other weights go to the replaced function, `original`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.cast import cast_master_weights_to_nvfp4, check_castable, post_all_gather_processing
from zerofp4.distributed import Stage
from zerofp4.storage import NVFP4Storage, called
from zerofp4.tensors import NVFP4Tensor

_WATCH = "megatron_watch"
"""Attachment of the first weight of a cast: its _Watch."""


def modify_nvfp4_rowwise_storage(
    original: Callable, fp4_tensor: torch.Tensor, new_rowwise_data: torch.Tensor
) -> None:
    """Moves the codes into a view of Megatron's buffer."""
    if not isinstance(fp4_tensor, NVFP4Tensor):
        return original(fp4_tensor, new_rowwise_data)
    new_rowwise_data.copy_(fp4_tensor.rowwise_data)
    fp4_tensor.rowwise_data = new_rowwise_data


def unwrap_parameter_data(original: Callable, tensor: torch.Tensor) -> torch.Tensor:
    """Returns our weight itself: .data would make a new tensor, twice per step for each weight."""
    return tensor if isinstance(tensor, NVFP4Tensor) else original(tensor)


def quantize_nvfp4_param_shard(
    original: Callable,
    model_params: Sequence[torch.Tensor],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: dist.ProcessGroup,
    fsdp_shard_model_params: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Raises FloatingPointError, on every rank, if the last cast met a master with a NaN or Inf."""
    ours = [isinstance(weight, NVFP4Tensor) for weight in model_params]
    if any(ours) and fsdp_shard_model_params is not None:
        raise NotImplementedError("Megatron-FSDP cannot gather the packed codes of zerofp4's weights")
    lists = (model_params, main_params, start_offsets)
    if not all(ours):
        theirs = [_where(values, ours, False) for values in lists]
        shards = fsdp_shard_model_params and _where(fsdp_shard_model_params, ours, False)
        original(*theirs, data_parallel_group, shards)
    if any(ours):
        _cast(*[_where(values, ours, True) for values in lists], data_parallel_group)


def te_post_all_gather_processing(original: Callable | None, model_params: Sequence[torch.Tensor]) -> None:
    """original: None without TransformerEngine."""
    ours = [isinstance(weight, NVFP4Tensor) for weight in model_params]
    if not all(ours) and original is not None:
        original(_where(model_params, ours, False))
    if any(ours):
        post_all_gather_processing(_where(model_params, ours, True))


def _where(values: Sequence, flags: Sequence[bool], wanted: bool) -> list:
    return [value for value, flag in zip(values, flags, strict=True) if flag == wanted]


def _cast(
    weights: list[NVFP4Tensor],
    masters: list[torch.Tensor | None],
    start_offsets: list[int | None],
    group: dist.ProcessGroup,
) -> None:
    for i, weight in enumerate(weights):
        _check_gathered(called(f"weight {i}", weight), weight.record)
    attachments = weights[0].record.attachments
    watch = attachments.get(_WATCH)
    if watch is None:
        watch = attachments[_WATCH] = _Watch(weights[0].device)
        for weight in weights:  # Megatron does so only where a rank owns a part of it
            weight.clear_high_precision_init_val()
    watch.check(weights, masters)
    cast_master_weights_to_nvfp4(weights, masters, start_offsets, group, found_inf=watch.found_inf)
    watch.note()


def _check_gathered(name: str, record: NVFP4Storage) -> None:
    """Raises ValueError for a weight that Megatron-Core's gather would not complete."""
    if record.scales_travel:
        raise ValueError(
            f"{name} has block {record.block} and four_over_six {record.four_over_six}: Megatron-Core "
            "gathers codes of weights, and no scales, which a rank knows of its own shard only. Use block "
            "(16, 16) without four_over_six, or ZeroFP4Optimizer"
        )
    check_castable(name, record)


class _Watch:
    """Reports NaN or Inf masters, which change no weight, one cast late: the host never waits for a GPU."""

    def __init__(self, device: torch.device):
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        on_gpu = device.type == "cuda"
        self._seen = torch.zeros(1, dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None

    def note(self) -> None:
        """The cast is queued."""
        self._seen.copy_(self.found_inf, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def check(self, weights: list[NVFP4Tensor], masters: list[torch.Tensor | None]) -> None:
        """Raises FloatingPointError if the last cast met one."""
        if self._done is not None:
            self._done.synchronize()
        if not self._seen.item():
            return
        self.found_inf.zero_()
        self._seen.zero_()
        pairs = enumerate(zip(weights, masters, strict=True))
        bad = [called(f"weight {i}", w) for i, (w, m) in pairs if m is not None and not m.isfinite().all()]
        raise FloatingPointError(
            "master weights became NaN or Inf in the step before this one, and the weights of them were left "
            f"as they were: on this rank {', '.join(bad) or 'none, but on another'}"
        )


# Checkpoints


def preprocess(
    original: Callable, nested_values: Callable[[Any], Iterable], sharded_state_dict: Any, *args, **kwargs
) -> Any:
    """Called before a sharded state dict is saved or loaded: its entries get values instead of weights."""
    for entry in nested_values(sharded_state_dict):
        if isinstance(getattr(entry, "data", None), NVFP4Tensor):
            entry.data = entry.data.detach().dequantize()
    return original(sharded_state_dict, *args, **kwargs)


def load(
    self, original: Callable, has_masters: Callable[[Any], bool], state_dict: Any, *args, **kwargs
) -> None:
    """Loads the state of an optimizer, or a file with masters. Weights follow the loaded masters, if any:
    quantizing a checkpoint's weights, which were quantized before, would give other bytes.
    """
    original(self, state_dict, *args, **kwargs)
    if has_masters(state_dict):
        _cast_masters(self)


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
