"""Replaces TransformerEngine's functions by ours, and restores them."""

import importlib
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import cast
from zerofp4.integrations.transformer_engine.records import KNOWN, NEWEST, OLDEST, record_of_tensor

_originals: dict[str, Callable] = {}
"""TransformerEngine's own functions, while they are replaced."""


def install() -> None:
    """Put our cast behind TransformerEngine's quantize_master_weights and post_all_gather_processing, until
    uninstall(). Modules that imported these functions by name get ours, too. A second call changes nothing.

    Raises ImportError if TransformerEngine cannot be imported, RuntimeError for unknown versions.
    """
    if _originals:
        return
    utils = _find_utils()
    found = {name: getattr(utils, name) for name in _REPLACEMENTS}
    for name, ours in _REPLACEMENTS.items():
        _exchange(found[name], ours)
    _originals.update(found)


def uninstall() -> None:
    """Undo install(), in every module that has our functions. Changes nothing without it."""
    for name, original in _originals.items():
        _exchange(_REPLACEMENTS[name], original)
    _originals.clear()


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """cast_master_weights_to_nvfp4 for the NVFP4 weights, TransformerEngine's function for the others. Errors
    count the NVFP4 weights only.

    Drops the initial values of weights, as TransformerEngine does. Raises ValueError for
    manual_post_all_gather_processing=False, with which TransformerEngine frees the columnwise copies.
    """
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    ours = [_is_nvfp4(weight) for weight in model_weights]
    theirs = [not mine for mine in ours]
    if any(theirs):
        *others, shard_codes = (_pick(values, theirs) for values in lists)
        _originals["quantize_master_weights"](*others, group, shard_codes, manual_post_all_gather_processing)
    if not any(ours):
        return
    weights, masters, starts, shard_codes = (_pick(values, ours) for values in lists)
    cast.cast_master_weights_to_nvfp4(
        weights, masters, starts, group, shard_codes, manual_post_all_gather_processing
    )
    for weight in weights:
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()


def post_all_gather_processing(model_weights: torch.Tensor | list[torch.Tensor]) -> None:
    """Write the columnwise codes of NVFP4 weights into their buffers. TransformerEngine's function gets all
    other weights, and those whose columnwise buffers were freed, for which it makes new ones.
    """
    weights = model_weights if isinstance(model_weights, list) else [model_weights]
    ours = [_is_nvfp4(weight) and _has_columnwise(weight) for weight in weights]
    if not all(ours):
        _originals["post_all_gather_processing"](_pick(weights, [not mine for mine in ours]))
    if any(ours):
        cast.post_all_gather_processing(_pick(weights, ours))


_REPLACEMENTS = {f.__name__: f for f in (quantize_master_weights, post_all_gather_processing)}


def _is_nvfp4(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and record_of_tensor(weight) is not None


def _has_columnwise(weight: torch.Tensor) -> bool:
    """Also true for a weight with a wrong columnwise copy, for which our function raises."""
    record = record_of_tensor(weight)
    return record.columnwise is not None or record.problem is not None


def _pick(values: Sequence | None, chosen: Sequence[bool]) -> list | None:
    return values and [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]


def _find_utils() -> types.ModuleType:
    try:
        package = importlib.import_module("transformer_engine")
        version = str(getattr(package, "__version__", "without a version"))
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
            raise RuntimeError(f"TransformerEngine {version} is not known to zerofp4, which knows {KNOWN}")
        return importlib.import_module("transformer_engine.pytorch.tensor.utils")
    except ImportError as error:
        raise ImportError(f"install() needs TransformerEngine, which cannot be imported: {error}") from error


def _exchange(old: Callable, new: Callable) -> None:
    """In every other module that has `old` under any name."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module.__name__ != __name__:
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
