"""scripts/train.py --parallel fsdp2: the model cut by PyTorch's fully_shard, and what train.py asks of an
optimizer, of one of torch's.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zerofp4.integrations import fsdp2
from zerofp4.launch.process_group import World
from zerofp4.testing import verify_weights


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    converted: bool,
    takes: Callable[[nn.Module, str], bool] | None,
    world: World,
    dtype: torch.dtype,
) -> None:
    """Cut a float32 model, a group of parameters to a block. converted: linear layers travel in 4 bits, those
    that the filter takes. dtype: what the others travel in, and what layers compute in.
    """
    if converted:
        fsdp2.prepare(model, takes)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


class ShardedMixin:
    """What train.py asks of an optimizer and torch's do not have. A step whose gradients hold a NaN or Inf
    updates nothing, on any rank.
    """

    model: nn.Module
    converted: bool
    gathers: int
    itemsize: int
    skipped_steps = 0

    def begin(self, model: nn.Module, converted: bool, micro_batches: int, dtype: torch.dtype) -> None:
        self.model, self.converted, self.gathers = model, converted, micro_batches
        self.itemsize = dtype.itemsize
        if converted:
            fsdp2.attach(model, self)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).full_tensor()
        if not math.isfinite(norm.item()):
            self.zero_grad()
            self.skipped_steps += 1
        return norm

    def first_nonfinite(self) -> str:
        return "some parameter"

    def gathered_bytes_per_step(self) -> dict[str, int]:
        """Of this model's parameters, each once for a micro-batch, as ranks pad them."""
        size = dist.get_world_size()
        found = {"nvfp4": 0, "high_precision": 0, "bf16_equivalent": 0}
        if size == 1:
            return found
        names = {weight.name for *_, weight in fsdp2.prepared_weights(self.model)} if self.converted else ()
        for name, p in self.model.named_parameters():
            numel = -(-p.shape[0] // size) * size * p.shape[1:].numel() * self.gathers
            kind, factor = ("nvfp4", 0.5) if name in names else ("high_precision", self.itemsize)
            found[kind] += int(numel * factor)
            found["bf16_equivalent"] += 2 * numel
        return found

    def verify(self) -> dict[str, int]:
        """verify_model() of what layers compute with. Collective."""
        state = self.model.state_dict()  # which has buffers, and tied parameters under each of their names
        masters = {name: state[name].full_tensor() for name, _ in self.model.named_parameters()}
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.unshard()
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        found = verify_weights(weights, [masters[name] for name in weights])
        for module in modules:
            module.reshard()
        return found


def sharded(optimizer_class: type[torch.optim.Optimizer]) -> type:
    """A class of optimizers with what train.py asks for."""
    return type(f"Sharded{optimizer_class.__name__}", (ShardedMixin, optimizer_class), {})


class ByName:
    """The state of an optimizer of torch for torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state)
