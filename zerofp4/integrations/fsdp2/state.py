"""State dicts of a prepared model: plain FP32 tensors go out, masters are made of those that come in."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from zerofp4.integrations.fsdp2.master import MasterShard, plain_of
from zerofp4.integrations.fsdp2.weight import Weight

_WEIGHTS = "zerofp4_weights"
"""Attribute of a module: its prepared weights by parameter name. Serving reads it."""


def register(module: nn.Module, parameter_name: str, weight: Weight) -> None:
    """Note a prepared weight. Its module's state dict holds, and loads, the master as a plain tensor."""
    weights = vars(module).setdefault(_WEIGHTS, {})
    if not weights:
        module.register_state_dict_post_hook(_unwrap)
        module.register_load_state_dict_pre_hook(_take_over)
    weights[parameter_name] = weight


def prepared_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Weight]]:
    """(module, parameter name, weight) of all prepared weights."""
    for module in model.modules():
        for name, weight in vars(module).get(_WEIGHTS, {}).items():
            yield module, name, weight


def _unwrap(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    for name in vars(module)[_WEIGHTS]:
        value = state_dict.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):  # as it is with keep_vars=True
            state_dict[prefix + name] = _with_local(value, plain_of)


def _take_over(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, *_) -> None:
    for name, weight in vars(module)[_WEIGHTS].items():
        weight.was_loaded = True
        value = state_dict.get(prefix + name)
        if value is None or not local_metadata.get("assign_to_params_buffers"):
            continue
        if value.dtype != torch.float32:
            raise TypeError(
                f"{prefix + name} is a master and must be float32 to be assigned, got {value.dtype}"
            )

        def master(local: torch.Tensor, weight: Weight = weight) -> MasterShard:
            return local if isinstance(local, MasterShard) else MasterShard(local.detach(), weight)

        state_dict[prefix + name] = _with_local(value, master)


def _with_local(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """function(tensor), or for a DTensor the same over function(local tensor)."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    made = function(tensor._local_tensor)
    return tensor if made is tensor._local_tensor else DTensor(made, tensor._spec, requires_grad=False)


def zero_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """The state_dict() that ZeroFP4Optimizer would have for these parameters, for
    torch.distributed.checkpoint: {"state": {name: {"master": ..., "exp_avg": ..., ...}}}. Its DTensors share
    the memory of the masters and of the optimizer's state, so dcp.load fills those. Collective.

    So a run can change between the two: save {"optimizer": zero_state_dict(model, optimizer)} and load it
    into a ZeroFP4Optimizer, or load what one has saved, both with
    DefaultLoadPlanner(allow_partial_load=True), since options of groups are missing. Raises ValueError for
    compact state.
    """
    masters = get_model_state_dict(model)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    if any("scales" in entries for entries in state.values()):
        raise ValueError(
            'zero_state_dict of an optimizer with state="compact": ZeroFP4Optimizer keeps masters of 24 bits '
            'beside such moments, and FSDP2 float32 ones; build the optimizer with state="full"'
        )
    return {"state": {name: {"master": masters[name], **entries} for name, entries in state.items()}}
