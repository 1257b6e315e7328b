"""Models of fully_shard with several sets of ranks, or several dimensions of one mesh."""

from __future__ import annotations

import pytest
import torch
from cases.fsdp2 import BF16, Collectives, check_gathered, make_model, mesh_of, take_experts
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerofp4
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2


def step(world, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """With the same batch on every rank."""
    batch = torch.randn(6, 48, generator=torch.Generator().manual_seed(seed)).to(world.device)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(4)
def test_weights_of_two_sets_of_ranks_in_one_model(world):
    """Each set casts its own weights, with one all-reduce."""
    model = make_model(world)
    fsdp2.prepare(model, take_experts)
    everyone, pairs = mesh_of(world), mesh_of(world, (2, 2), ("replicate", "pair"))
    for name, module in model.named_children():
        if name != "norm":
            fully_shard(module, mesh=pairs if name in ("second", "experts") else everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    attachment = fsdp2.attach(model, optimizer)
    check_gathered(model)
    before = model.state_dict()["experts.stack"].full_tensor().clone()
    for seed in range(2):
        step(world, model, optimizer, seed)
        check_gathered(model)
    assert not torch.equal(model.state_dict()["experts.stack"].full_tensor(), before)
    with Collectives() as collectives:
        attachment.refresh()
    assert [name for name, *_ in collectives.calls] == ["allreduce", "allreduce"]


class Mlp(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.up = nn.Linear(48, 96, bias=False, dtype=dtype)
        self.down = nn.Linear(96, 48, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@on_ranks(4)
@pytest.mark.parametrize(
    ("shape", "mp_policy", "reshards"),
    [
        ((2, 2), BF16, True),
        ((2, 1, 2), MixedPrecisionPolicy(), False),
        ((1, 2, 2), MixedPrecisionPolicy(), True),
    ],
)
def test_slices_of_tensor_parallelism_are_weights_of_their_own(world, shape, mp_policy, reshards):
    """Beside shards, and replicas of them, of one mesh. The slices are plain values, also where they stay
    gathered.
    """
    names = ("replicate", "shard", "tensor")[-len(shape) :]
    mesh, dtype = mesh_of(world, shape, names), mp_policy.param_dtype or torch.float32
    model = make_model(world, model_class=Mlp)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert fsdp2.prepare(model).converted == ["up", "down"]
    modules, options = (model.up, model.down, model), {"reshard_after_forward": reshards}
    for module in modules:
        fully_shard(module, mesh=mesh[names[:-1]], mp_policy=mp_policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    fsdp2.attach(model, optimizer)
    for seed in range(3):
        for module in modules:
            module.unshard()
        for name, dim in (("up.weight", 0), ("down.weight", 1)):
            own = masters[name].chunk(2, dim)[mesh["tensor"].get_local_rank()].contiguous().to(dtype)
            values = model.get_parameter(name).to_local()
            assert_bytes_equal(values, zerofp4.quantize(own).dequantize(), f"{name} before step {seed}")
        for module in modules:
            module.reshard()
        step(world, model, optimizer, seed)
        after = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert not any(after[name].equal(masters[name]) for name in masters)
        masters = after
