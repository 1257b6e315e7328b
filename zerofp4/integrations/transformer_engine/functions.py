"""What takes the place of TransformerEngine's functions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import cast
from zerofp4.integrations.transformer_engine.records import record_of_tensor

originals: dict[str, Callable] = {}
"""TransformerEngine's own functions, while ours are in their place."""


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """What takes the place of TransformerEngine's function: cast_master_weights_to_nvfp4 for NVFP4 weights,
    and that function for the others of the list. Errors count the NVFP4 weights only.

    As there, the values that weights were initialized with are dropped. Raises ValueError for
    manual_post_all_gather_processing=False, which there frees the columnwise copies.
    """
    places = {i for i, weight in enumerate(model_weights) if _is_nvfp4(weight)}
    count = len(model_weights)
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    if len(places) < count:
        others = [_pick(values, set(range(count)) - places, count) for values in lists]
        originals["quantize_master_weights"](*others[:3], group, others[3], manual_post_all_gather_processing)
    if not places:
        return
    weights, masters, starts, shard_codes = (_pick(values, places, count) for values in lists)
    cast.cast_master_weights_to_nvfp4(
        weights, masters, starts, group, shard_codes, manual_post_all_gather_processing
    )
    for weight in weights:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()


def post_all_gather_processing(model_weights: torch.Tensor | list[torch.Tensor]) -> None:
    """What takes the place of TransformerEngine's function: the columnwise codes of NVFP4 weights, into their
    buffers. All other weights, and NVFP4 weights whose columnwise buffers were freed, are left to that
    function, which makes these anew.
    """
    weights = model_weights if isinstance(model_weights, list) else [model_weights]
    ours = [_is_nvfp4(weight) and _has_columnwise(weight) for weight in weights]
    others = [weight for weight, mine in zip(weights, ours, strict=True) if not mine]
    if others:
        originals["post_all_gather_processing"](others)
    if any(ours):
        cast.post_all_gather_processing([w for w, mine in zip(weights, ours, strict=True) if mine])


def _is_nvfp4(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and record_of_tensor(weight) is not None


def _has_columnwise(weight: torch.Tensor) -> bool:
    """Also of one whose columnwise copy is not right, which our function will say."""
    record = record_of_tensor(weight)
    return record.columnwise is not None or record.problem is not None


def _pick(values: Sequence | None, places: set[int], count: int) -> list | None:
    """The values at these places of `count`; what there is too much stays, so that it is found out."""
    if values is None:
        return None
    return [value for i, value in enumerate(values) if i in places or i >= count]
