"""A trained model in ordinary tensors: a state dict of its masters, safetensors, ordinary parameters."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofp4.distributed import attempt, exchange, rank_and_size
from zerofp4.optim.averages import AveragedMasters
from zerofp4.optim.initial import HeldMaster
from zerofp4.optim.sharded_piece import gathered, make_piece
from zerofp4.optim.state import ShardedState
from zerofp4.tensors import NVFP4Tensor, QuantizedTensor, check_not_held

SHARD_BYTES = 5 * 10**9
"""Of tensors in a file of safetensors, at most, unless one tensor has more."""


def master_state_dict(
    model: nn.Module, optimizer: ShardedState | AveragedMasters, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, tensor) for each key of model.state_dict(), in its order, whole on every rank.

    A parameter that the optimizer trains has its FP32 master's values, or with AveragedMasters in place of
    the optimizer their average, any other parameter its own, rounded to dtype; buffers stay as they are. Each
    tensor has memory of its own, tied ones too.

    Collective: one tensor is gathered at a time, so that no rank holds the model in FP32, and every rank
    takes all of them, in the same order. `dict(master_state_dict(...))` is for safetensors and for
    save_pretrained(state_dict=...).

    Raises TypeError for an optimizer that is no ZeroFP4Optimizer, and for a dtype that is not floating,
    RuntimeError for an optimizer whose parameters a later one has taken over.
    """
    return _masters(model, *_find_masters(optimizer, dtype), dtype)


def _find_masters(source: Any, dtype: torch.dtype) -> tuple[ShardedState, dict[int, HeldMaster]]:
    """The optimizer, and this rank's pieces of its masters or their averages, by the identity of the
    parameter. source: the optimizer, or AveragedMasters of it.
    """
    optimizer = source.optimizer if isinstance(source, AveragedMasters) else source
    if not isinstance(optimizer, ShardedState):
        raise TypeError(f"optimizer must be a ZeroFP4Optimizer, got {type(optimizer).__name__}")
    optimizer._shards.check_not_taken_over()
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating one, got {dtype}")
    return optimizer, (optimizer._shards if source is optimizer else source).held_masters()


@torch.no_grad()
def _masters(
    model: nn.Module, optimizer: ShardedState, held: dict[int, HeldMaster], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's extra state
        parameter = parameters.get(key)
        if parameter is None:
            yield key, value.detach().clone()
        else:
            yield key, parameter_values(parameter, optimizer, held.get(id(parameter)), dtype)


def parameter_values(
    parameter: torch.Tensor, optimizer: ShardedState | None, held: HeldMaster | None, dtype: torch.dtype
) -> torch.Tensor:
    """A new plain tensor: the whole master of a parameter that the optimizer trains, which is collective,
    else what the parameter holds.
    """
    if held is not None:
        own = torch.zeros(0, device=parameter.device) if held.piece is None else held.piece
        home = optimizer.home_of(parameter)
        return gathered(make_piece(own, parameter.shape, held.shard.start, home)).to(dtype)
    if isinstance(parameter, NVFP4Tensor):
        value = parameter.get_high_precision_init_val()
        if value is not None:
            return value.to(parameter.device, dtype, copy=True)
    if isinstance(parameter, QuantizedTensor):
        return parameter.detach().dequantize(torch.float32).to(dtype)
    return parameter.detach().to(dtype, copy=True)


def save_safetensors(
    model: nn.Module,
    optimizer: ShardedState | AveragedMasters,
    folder: str | os.PathLike,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write what master_state_dict gives as safetensors, in the form that transformers reads: files of 5 GB
    at most, as they are gathered, and an index where there are several.

    Collective; rank 0 of the optimizer's group writes. A file appears under its name once it is whole, the
    index last. What rank 0 raises (ImportError without the package safetensors, OSError) the others raise as
    a RuntimeError. Raises ValueError where ranks train different parameters.
    """
    optimizer, masters = _find_masters(optimizer, dtype)
    group = optimizer.process_group()
    writes = rank_and_size(group)[0] == 0
    if optimizer.has_other_parameters_elsewhere():
        raise ValueError(
            "save_safetensors writes the model of rank 0, and other ranks train other parameters (experts, "
            "slices, stages): write what master_state_dict gives on a rank of each process group"
        )
    folder = Path(folder)
    files, error = None, None
    if writes:
        files, error = attempt(_plan, model, folder, dtype)
    exchange(None, error, group, "save_safetensors()")
    held: dict[str, torch.Tensor] = {}
    for key, tensor in _masters(model, optimizer, masters, dtype):
        if not writes or error is not None:
            continue  # the others wait in the gathers: an error is told at the end
        held[key] = tensor.cpu().contiguous()
        if len(held) == len(files[0][1]):
            _, error = attempt(_write, folder / files.pop(0)[0], held)
            held = {}
    exchange(None, error, group, "save_safetensors()")


def _plan(model: nn.Module, folder: Path, dtype: torch.dtype) -> list[tuple[str, list[str]]]:
    """[(file, its keys)], the folder made, and the index written where it is needed."""
    import safetensors.torch  # noqa: F401

    parameters = dict(model.named_parameters(remove_duplicate=False))
    sizes = {
        key: value.numel() * (dtype.itemsize if key in parameters else value.itemsize)
        for key, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "model.safetensors.index.json"
    if len(shards) == 1:
        index.unlink(missing_ok=True)
        return [("model.safetensors", shards[0])]
    files = [(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors", keys) for i, keys in enumerate(shards)]
    weight_map = {key: name for name, keys in files for key in keys}
    text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=2)
    index.with_suffix(".draft").write_text(text)
    return files


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    draft = path.with_suffix(".draft")
    save_file(tensors, str(draft), metadata={"format": "pt"})
    draft.replace(path)
    index = path.parent / "model.safetensors.index.draft"
    last = path.stem.partition("-of-")
    if last[1] and last[0].endswith(last[2]):
        index.replace(index.with_suffix(".json"))


def unconvert_model(model: nn.Module, optimizer: ShardedState | AveragedMasters | None = None) -> list[str]:
    """Replace quantized weights, in place, by ordinary parameters of their dtype, shape and requires_grad.

    optimizer: that of the weights, whose masters give the values, or AveragedMasters of it; then it is
    collective, and the optimizer is of no more use: its step() raises. Without one a weight has what it held
    before it was converted, if nothing has trained it since, else the values of its codes.

    Returns the names of the parameters. Raises RuntimeError, before anything is changed, for a weight that
    another optimizer or DistributedDataParallel holds.
    """
    held: dict[int, HeldMaster] = {}
    if optimizer is not None:
        optimizer, held = _find_masters(optimizer, torch.float32)
    found = [
        (module, name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, QuantizedTensor)
    ]
    others = [(full_name, module._parameters[name]) for module, name, full_name in found]
    check_not_held([(name, p) for name, p in others if id(p) not in held])
    made: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module, name, _ in found:
            old = module._parameters[name]
            if id(old) not in made:
                made[id(old)] = _ordinary(old, optimizer, held.get(id(old)))
            setattr(module, name, made[id(old)])
    return [full_name for _, _, full_name in found]


def _ordinary(old: QuantizedTensor, optimizer: ShardedState | None, held: HeldMaster | None) -> nn.Parameter:
    new = nn.Parameter(parameter_values(old, optimizer, held, old.dtype), old.requires_grad)
    vars(new).update({k: v for k, v in vars(old).items() if k not in ("record", "_is_param")})
    new.grad = old.grad
    return new
