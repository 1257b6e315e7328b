"""All uses of FSDP2's private API, tried with torch 2.10 to 2.13: where it put prepared weights."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from zerofp4.format import WEIGHT_DTYPES
from zerofp4.launch import backend_for


class Placement:
    """Where FSDP2 has put a weight's master. References are weak: cycles through views leak.

    group: the ranks that the weight is sharded over. device: where it is gathered. dtype: of layers.
    shape: of the gathered weight; under tensor parallelism of this rank's slice.
    first_row, rows: this rank's shard. padded_rows: every rank's input to the all-gather.
    """

    def __init__(self, found: FoundParam, dtype: torch.dtype):
        state, group, param, self._is_outermost = found
        self._state_of, self._group_of, self._param_of = map(weakref.ref, (state, group, param))
        self.group: dist.ProcessGroup = param.mesh_info.shard_process_group
        self.shape: torch.Size = param._orig_size
        self.padded_rows: int = param.padded_sharded_param_size[0]
        self.first_row = min(param.mesh_info.shard_mesh_rank * self.padded_rows, self.shape[0])
        self.rows = min(self.padded_rows, self.shape[0] - self.first_row)
        self.device, self.dtype = param.device, dtype

    @property
    def param(self) -> Any:
        """The FSDPParam."""
        return self._param_of()

    @property
    def start(self) -> int | None:
        """The index of this rank's first element; None if it has none."""
        return self.first_row * self.shape[1:].numel() if self.rows else None

    def master(self) -> torch.Tensor:
        """This rank's rows, at their present place. Raises AttributeError if they are no MasterShard."""
        return self.param.sharded_param._local_tensor.local

    def is_gathered(self) -> bool:
        return self.param.sharded_state is ShardedState.UNSHARDED

    def reshards(self) -> bool:
        """Whether FSDP2 frees the gathered weight after the forward pass. By default the outermost module
        keeps its own; FSDP2 decides that in the first forward pass, and earlier gathers must agree.
        """
        keeps = self._is_outermost and self._state_of()._auto_reshard_after_forward
        return self._group_of()._reshard_after_forward and not keeps


class FoundParam(NamedTuple):
    """FSDP2's objects for a parameter, and whether its module is the outermost one of fully_shard."""

    state: Any
    group: Any
    param: Any
    is_outermost: bool


class Sharded:
    """A model after fully_shard. params: by (id of the module, parameter name)."""

    def __init__(self, model: nn.Module):
        self.params: dict[tuple[int, str], FoundParam] = {}
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        inner = {child for module in sharded for child in module.modules() if child is not module}
        for module in sharded:
            state = module._get_fsdp_state()
            for group in _param_groups(state):
                for param in group.fsdp_params:
                    key = id(param._module_info.module), param._module_info.param_name
                    self.params[key] = FoundParam(state, group, param, module not in inner)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """All groups that parameters are sharded or replicated over, in the order of the model."""
        found = {}
        for one in self.params.values():
            for kind in ("shard", "replicate"):
                group = getattr(one.param.mesh_info, f"{kind}_process_group", None)
                if group is not None:
                    found.setdefault(tuple(dist.get_process_group_ranks(group)), group)
        return list(found.values())


def _param_groups(state) -> list:
    """One until torch 2.12, several since."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (several or [state._fsdp_param_group]) if group is not None]


def placement_of(found: FoundParam | None, called: str, dtype: torch.dtype) -> Placement:
    """Where a weight is. RuntimeError if it is not sharded or has no values, ValueError if unsupported."""
    if found is None:
        raise RuntimeError(f"{called!r} was prepared, but is not sharded: call fully_shard before attach")
    param = found.param
    _check_supported(called, found.group, param)
    local = param._sharded_local_tensor
    if not hasattr(local, "zerofp4_master"):
        raise RuntimeError(
            f"{called!r} was prepared, but its parameter was replaced since by one of {local.dtype}: "
            "give a model its dtype before prepare"
        )
    if local.is_meta:
        raise RuntimeError(f"{called!r} is on the meta device: give it values before attach")
    dtype = param.mp_policy.param_dtype or dtype
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{called!r} is to be gathered in {dtype}, which is not one of {WEIGHT_DTYPES}")
    return Placement(found, dtype)


def _check_supported(called: str, group: Any, param: Any) -> None:
    if not hasattr(param.mesh_info, "shard_process_group"):
        raise ValueError(f"{called!r} is replicated, not sharded: there is nothing to gather")
    if param.fsdp_placement.dim != 0:
        raise ValueError(
            f"{called!r} is sharded on dim {param.fsdp_placement.dim}: packed rows are gathered whole, "
            "so that shard_placement_fn must leave it on dim 0"
        )
    if group._use_post_forward_mesh:
        raise ValueError(
            f"reshard_after_forward={group.post_forward_mesh_info.shard_mesh_size} keeps a part of "
            f"{called!r} after the forward pass, which torch cannot do with what is gathered by an "
            "extension: give True or False"
        )
    group = param.mesh_info.shard_process_group
    if param.offload_to_cpu and backend_for(group, torch.device("cpu")) is None:
        raise ValueError(
            f"{called!r} is offloaded to the CPU, where its amax has to be reduced, and the process "
            "group has no backend for it: init_process_group('cpu:gloo,cuda:nccl')"
        )


def check_dtypes(sharded: Sharded) -> None:
    """Raises ValueError if trained parameters of a group differ in dtype: FSDP2 has one for all."""
    for group in {id(found.group): found.group for found in sharded.params.values()}.values():
        trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        others = [param for param in trained if param.sharded_param.dtype != torch.float32]
        if len(others) not in (0, len(trained)):
            info = others[0]._module_info
            raise ValueError(
                f"{info.param_name} of a {type(info.module).__name__} is {others[0].sharded_param.dtype}, "
                "the masters beside it are float32, and fully_shard takes one dtype: call model.float() "
                "before prepare, and give MixedPrecisionPolicy(param_dtype=torch.bfloat16) to fully_shard"
            )
