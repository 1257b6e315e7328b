"""save_safetensors: the masters of a trained model as files that transformers reads."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from zerofp4.distributed import OwnError, exchange, rank_and_size, resolve_group
from zerofp4.optim import (
    AveragedMasters,
    ZeroFP4Optimizer,
    check_one_rank_has_all,
    master_state_dict,
    named_tensors,
    own_values,
)
from zerofp4.serving.files import Export
from zerofp4.serving.plan import Served


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike,
    optimizer: ZeroFP4Optimizer | AveragedMasters | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write what master_state_dict gives as safetensors, in the form that transformers reads: files of at
    most 5 GB, and an index if there are several.

    optimizer: that of the weights, or AveragedMasters of it. Without one an NVFP4 weight has the value from
        before the conversion, if it still keeps it, else that of its codes.

    Collective. Rank 0 of the optimizer's group writes, and holds one file's tensors. An older export in the
    folder stays until the new one is written, and is gone afterwards. If rank 0 raises (OSError if the disk
    lacks the space, ImportError without the extra `serving`), the others raise a RuntimeError. Raises
    ValueError if ranks train different parameters, RuntimeError without the optimizer of trained parameters.
    """
    error = OwnError()
    if optimizer is None:
        tensors, group = own_values(model, dtype), resolve_group(None)
    else:
        tensors = master_state_dict(model, optimizer, dtype)
        owner = optimizer.optimizer if isinstance(optimizer, AveragedMasters) else optimizer
        check_one_rank_has_all(owner, "save_safetensors()")
        group = owner.process_group()
    if rank_and_size(group)[0] == 0:
        with error:
            _write(model, dtype, Path(folder), tensors)
    for _ in tensors:  # after an error too, since the other ranks wait in the gathers
        pass
    exchange(None, error, group, "save_safetensors()")


def _write(
    model: nn.Module, dtype: torch.dtype, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    served = [
        Served(key, dtype if is_parameter else value.dtype, tuple(value.shape))
        for key, value, is_parameter in named_tensors(model)
    ]
    export = Export(folder, served)
    try:
        export.begin()
        for key, tensor in tensors:
            export.add(key, tensor)
        export.publish()
    finally:
        export.end()
