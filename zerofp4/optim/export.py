"""A trained model in ordinary tensors: averages of its masters, a state dict, ordinary parameters."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerofp4.distributed import OwnError
from zerofp4.engine import joined
from zerofp4.optim.piece import Piece
from zerofp4.optim.sharded import initial_values
from zerofp4.optim.state_dict import MASTER, agree_on_save, find_saves, match
from zerofp4.optim.zero import ZeroFP4Optimizer
from zerofp4.tensors import QuantizedTensor, is_held

FindMaster = Callable[[torch.Tensor], Piece | None]
"""Finds this rank's piece of a parameter's master, or of its average."""


class AveragedMasters:
    """An exponential moving average (EMA) of the FP32 masters of a ZeroFP4Optimizer, sharded as they are.

    optimizer: of the masters. The average begins with their values, or with the values of weights that were
        written to since the last step.
    decay: the share of the average that an update keeps, from 0 to 1.

    Examples:
        >>> averages = zerofp4.optim.AveragedMasters(optimizer, decay=0.999)
        >>> averages.update()  # after each step
        >>> zerofp4.save_safetensors(model, folder, averages)

    master_state_dict, save_safetensors, serving.save_pretrained and unconvert_model take it instead of the
    optimizer, and give the averages in the model's own keys. state_dict() and load_state_dict() are for
    torch.distributed.checkpoint, in a world of any size.

    update() is not collective. It adds masters, so later writes to the weights do not change an average or
    its exports. The average takes 4 bytes for each element of this rank's slice. While update() runs, it
    takes the same again for the largest bucket, or twice that with masters of 24 bits.
    """

    def __init__(self, optimizer: ZeroFP4Optimizer, decay: float = 0.999):
        if not isinstance(optimizer, ZeroFP4Optimizer):
            raise TypeError(f"optimizer must be a ZeroFP4Optimizer, got {type(optimizer).__name__}")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        optimizer._shards.check_not_taken_over()
        self.optimizer, self.decay = optimizer, decay
        shards = optimizer._shards
        self._slices = [torch.zeros_like(b.masters, dtype=torch.float32) for b in shards.buckets]
        slices = iter(self._slices)
        self._views = shards.by_parameter(lambda bucket: bucket.own_views(next(slices)))
        for i, view in enumerate(self._views):
            if view is not None:
                view.copy_(joined(*shards.saved_planes(i)))

    @torch.no_grad()
    def update(self) -> None:
        """average = decay * average + (1 - decay) * master: three operations, each rounded to FP32, so that
        the bits do not depend on the number of ranks.
        """
        self.optimizer._shards.check_not_taken_over()
        self.optimizer._shards.check_sound()
        for average, bucket in zip(self._slices, self.optimizer._shards.buckets, strict=True):
            average.mul_(self.decay).add_(joined(bucket.masters, bucket.low) * (1 - self.decay))

    def _master(self, parameter: torch.Tensor) -> Piece | None:
        """As SavedState.master(), a piece of the average."""
        saved = self.optimizer._saved
        i = saved.indices.get(id(parameter))
        return None if i is None else saved.piece(i, self._views[i])

    def state_dict(self) -> dict[str, Any]:
        """Pieces in the parameters' shapes, like the optimizer's state_dict(). Makes no copies."""
        saved = self.optimizer._saved
        own = zip(saved.parameters, map(self._master, saved), strict=True)
        return {"state": {one.number: {"average": piece} for one, piece in own}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of averages, matched by name if both sides have names. Collective. If one
        does not fit, or they are of two saves, all ranks raise TypeError or ValueError, and nothing changes.
        """
        found, saves, error = [], set(), OwnError()
        with error:
            saved, group = self.optimizer._saved.parameters, {"params": list(state_dict["state"])}
            matched = match(state_dict | {"param_groups": [group]}, [[one.number for one in saved]])
            for one in saved:
                _, entries = matched.get(one.number, (0, {}))
                one.check_complete(["average"], entries)
                found.append(one.read("average", entries["average"], MASTER))
            _, saves = find_saves(state_dict)
        agree_on_save(saves, error, self.optimizer.process_group(), "load_state_dict() of averages")
        for own, values in zip(self._views, found, strict=True):
            if own is not None:
                own.copy_(values)


def master_state_dict(
    model: nn.Module, optimizer: ZeroFP4Optimizer | AveragedMasters, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the (key, tensor) pairs of a model's state dict, with FP32 masters as the values.

    model: its state_dict() has the keys, and their order.
    optimizer: the ZeroFP4Optimizer whose masters are the values of the parameters it trains, or
        AveragedMasters for their averages. A parameter that was written to since the last step, on every
        rank, has its own values, and so have other parameters.
    dtype: that parameters are rounded to. Buffers are not rounded.

    Examples:
        >>> plain.load_state_dict(dict(zerofp4.master_state_dict(model, optimizer)))

    Every tensor is whole on every rank and has its own memory, tied ones too.

    Collective: one tensor is gathered at a time, so that no rank holds the model in FP32. Every rank takes
    all of them, in the same order. Raises RuntimeError for an optimizer that is `broken`, or whose parameters
    a later one has taken over.
    """
    return _values(model, _find_masters(optimizer, dtype)[1], dtype)


def _find_masters(source: Any, dtype: torch.dtype = torch.float32) -> tuple[ZeroFP4Optimizer, FindMaster]:
    """The optimizer, and how to find its masters. source: the optimizer, or AveragedMasters of it."""
    optimizer = source.optimizer if isinstance(source, AveragedMasters) else source
    if not isinstance(optimizer, ZeroFP4Optimizer):
        raise TypeError(f"optimizer must be a ZeroFP4Optimizer, got {type(optimizer).__name__}")
    optimizer._shards.check_not_taken_over()
    optimizer._check_sound()
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating one, got {dtype}")
    if source is optimizer:
        return optimizer, lambda parameter: optimizer._saved.master(parameter, follows_writes=True)
    return optimizer, source._master


def own_values(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """As master_state_dict, of a model that no ZeroFP4Optimizer trains: RuntimeError if one does."""
    for name, parameter in model.named_parameters():
        _check_not_held(name, parameter, apart_from=None)
    return _values(model, lambda parameter: None, dtype)


def _check_not_held(name: str, parameter: torch.Tensor, apart_from: ZeroFP4Optimizer | None) -> None:
    own = None if apart_from is None else apart_from._shards.holder
    if is_held(parameter, apart_from=own):
        raise RuntimeError(f"{name} is held by a ZeroFP4Optimizer: pass it, or delete it first")


def check_one_rank_has_all(optimizer: ZeroFP4Optimizer, call: str) -> None:
    """Raise ValueError if ranks train different parameters, which `call` cannot gather on one rank."""
    optimizer._agreement.check_one_rank_has_all(call)


@torch.no_grad()
def _values(
    model: nn.Module, find_master: FindMaster, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value, is_parameter in named_tensors(model):
        if is_parameter:
            yield key, parameter_values(value, find_master(value), dtype)
        else:
            yield key, value.detach().clone()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Keys and tensors of a model's state dict, without extra state of modules; True for a parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield key, parameters.get(key, value), key in parameters


def parameter_values(parameter: torch.Tensor, master: Piece | None, dtype: torch.dtype) -> torch.Tensor:
    """A new plain tensor: the whole master, which is collective, or the values of a parameter without one."""
    if master is not None:
        return master.full_tensor().to(dtype)
    return initial_values(parameter).view(parameter.shape).to(parameter.device, dtype, copy=True)


def gather_masters(
    optimizer: ZeroFP4Optimizer | AveragedMasters, parameters: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor | None]:
    """Collective: the whole FP32 master of each parameter, gathered when it is asked for, or None. Raises at
    once, as master_state_dict().
    """
    masters = map(_find_masters(optimizer)[1], parameters)
    return (None if master is None else master.full_tensor() for master in masters)


def unconvert_model(
    model: nn.Module,
    optimizer: ZeroFP4Optimizer | AveragedMasters | None = None,
    *,
    values: str = "initial",
) -> list[str]:
    """Replace quantized weights, in place, by ordinary parameters of their dtype, shape and requires_grad.

    model: with weights of convert_model.
    optimizer: of the weights, or AveragedMasters of it. It cannot be used afterwards: its step() raises.
    values: "initial" gives a weight its master, or its average, which is collective; without a master the
        value from before the conversion if the weight keeps it (get_high_precision_init_val()), else the
        value of its codes. "codes" gives the value of the 4-bit codes, and is not collective.

    Returns the names of the parameters.

    Examples:
        >>> names = zerofp4.unconvert_model(model, optimizer)

    A frozen weight keeps its value from before the conversion until an optimizer trains other parameters of
    its model, such as adapters. These are trained beside the codes, so merge them into "codes".

    Raises ValueError for other `values`, and RuntimeError, before anything is changed, for a weight that
    another ZeroFP4Optimizer trains.
    """
    if values not in ("initial", "codes"):
        raise ValueError(f'values must be "initial" or "codes", got {values!r}')
    find_master: FindMaster = {}.get
    if optimizer is not None:
        optimizer, find_master = _find_masters(optimizer)
    found = {
        f"{prefix}.{name}".removeprefix("."): (module, name)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, QuantizedTensor)
    }
    for full_name, (module, name) in found.items():
        _check_not_held(full_name, module._parameters[name], apart_from=optimizer)
    made: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module, name in found.values():
            old = module._parameters[name]
            if id(old) not in made:
                is_codes = values == "codes"
                value = old.dequantize() if is_codes else parameter_values(old, find_master(old), old.dtype)
                new = made[id(old)] = nn.Parameter(value, old.requires_grad)
                vars(new).update({k: v for k, v in vars(old).items() if k not in ("record", "_is_param")})
                new.grad = old.grad
            setattr(module, name, made[id(old)])
    return list(found)
