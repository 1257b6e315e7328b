"""Where fully_shard has put prepared weights, read from torch; what it cannot gather in 4 bits is refused."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zerofp4.format import WEIGHT_DTYPES
from zerofp4.integrations.fsdp2.master import MasterShard
from zerofp4.integrations.fsdp2.weight import Placement, Weight


class Sharded:
    """What fully_shard made of a model: FSDP2's records of parameters, by module and name."""

    def __init__(self, model: nn.Module):
        self._params: dict[tuple[int, str], tuple[Any, Any]] = {}
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in _param_groups(module._get_fsdp_state()):
                for param in group.fsdp_params:
                    info = param._module_info
                    self._params[id(info.module), info.param_name] = group, param
        self.groups = {id(group): group for group, _ in self._params.values()}.values()

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All that parameters are sharded or replicated over, in the order of the model."""
        found = {}
        for _, param in self._params.values():
            for kind in ("shard", "replicate"):
                group = getattr(param.mesh_info, f"{kind}_process_group", None)
                if group is not None:
                    found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        return list(found.values())

    def find(self, module: nn.Module, name: str) -> tuple[Any, Any] | None:
        """(FSDP2's group of parameters, its record) of a module's parameter."""
        return self._params.get((id(module), name))


def _param_groups(state) -> list:
    """One until torch 2.12, several since."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (several or [state._fsdp_param_group]) if group is not None]


def placement_of(sharded: Sharded, module: nn.Module, name: str, weight: Weight) -> Placement:
    """Where a weight is. Raises RuntimeError where it is not sharded or has no values yet, ValueError for
    what cannot be gathered in 4 bits.
    """
    found = sharded.find(module, name)
    if found is None:
        raise RuntimeError(
            f"{weight.name!r} was prepared, but is not sharded: call fully_shard before attach"
        )
    group, param = found
    _check_supported(weight, group, param)
    local = param._sharded_local_tensor
    if not isinstance(local, MasterShard):
        raise RuntimeError(
            f"{weight.name!r} was prepared, but its parameter was replaced since by one of {local.dtype}: "
            "give a model its dtype before prepare"
        )
    if local.is_meta:
        raise RuntimeError(f"{weight.name!r} is on the meta device: give it values before attach")
    dtype = param.mp_policy.param_dtype or weight.dtype
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{weight.name!r} is to be gathered in {dtype}, which is not one of {WEIGHT_DTYPES}")
    rows, padded = param._orig_size[0], param.padded_sharded_param_size[0]
    first = min(param.mesh_info.shard_mesh_rank * padded, rows)
    return Placement(
        param_of=weakref.ref(param),
        group=param.mesh_info.shard_process_group,
        shape=param._orig_size,
        first_row=first,
        rows=min(padded, rows - first),
        padded_rows=padded,
        device=param.device,
        dtype=dtype,
    )


def _check_supported(weight: Weight, group, param) -> None:
    if not hasattr(param.mesh_info, "shard_process_group"):
        raise ValueError(f"{weight.name!r} is replicated, not sharded: there is nothing to gather")
    if param.fsdp_placement.dim != 0:
        raise ValueError(
            f"{weight.name!r} is sharded on dim {param.fsdp_placement.dim}: packed rows are gathered whole, "
            "so that shard_placement_fn must leave it on dim 0"
        )
    if group._use_post_forward_mesh:
        raise ValueError(
            f"reshard_after_forward={group.post_forward_mesh_info.shard_mesh_size} keeps a part of "
            f"{weight.name!r} after the forward pass, which torch cannot do with what is gathered by an "
            "extension: give True or False"
        )
    if param.offload_to_cpu and not has_cpu_backend(param.mesh_info.shard_process_group):
        raise ValueError(
            f"{weight.name!r} is offloaded to the CPU, where its amax has to be reduced, and the process "
            "group has no backend for it: init_process_group('cpu:gloo,cuda:nccl')"
        )


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether tensors on the CPU can be reduced in it."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def check_dtypes(sharded: Sharded) -> None:
    """Raises ValueError for a group of parameters that FSDP2 cannot reduce the gradients of: it has one dtype
    for all of them.
    """
    for group in sharded.groups:
        trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        others = [param for param in trained if param.sharded_param.dtype != torch.float32]
        if len(others) not in (0, len(trained)):
            info = others[0]._module_info
            raise ValueError(
                f"{info.param_name} of a {type(info.module).__name__} is {others[0].sharded_param.dtype}, "
                "the masters beside it are float32, and fully_shard takes one dtype: call model.float() "
                "before prepare, and give MixedPrecisionPolicy(param_dtype=torch.bfloat16) to fully_shard"
            )
