"""FSDP2 gathers in 4 bits what quantizing the whole master would give, in every world."""

from __future__ import annotations

import pytest
import torch
from fsdp2_cases import (
    CONVERTED,
    Collectives,
    Model,
    batch_of,
    check_gathered,
    make_model,
    mesh_of,
    reshard,
    start,
    take_experts,
    whole,
)
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerofp4
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_what_is_gathered_is_the_whole_master_quantized(world, reshard_after_forward):
    run = start(world, reshard_after_forward=reshard_after_forward)
    check_gathered(run.model, as_values=reshard_after_forward)
    first = run.model.state_dict()["experts.stack"]
    before = whole(first).clone()
    for step in range(3):
        run.step(batch_of(world, step))
        check_gathered(run.model, as_values=reshard_after_forward)
    assert not torch.equal(whole(run.model.state_dict()["experts.stack"]), before)


@on_ranks(1, 3)
def test_mixed_precision_rounds_masters_to_its_dtype(world):
    run = start(world, mp_policy=BF16)
    for step in range(2):
        run.step(batch_of(world, step))
        check_gathered(run.model, torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in run.model.parameters())


@on_ranks(2, 3)
def test_weights_of_an_amax_group_share_one(world):
    run = start(world, amax_groups=lambda model: [[model.first.weight, model.third.weight]])
    run.step(batch_of(world, 0))
    state = run.model.state_dict()
    largest = torch.stack([whole(state[name]).abs().max() for name in ("first.weight", "third.weight")]).max()
    check_gathered(run.model, amax={name: largest.view(1) for name in ("first.weight", "third.weight")})


@on_ranks(1, 3)
def test_collectives_of_a_step_and_bytes_of_a_gather(world):
    run = start(world)
    run.backward(batch_of(world, 0))
    with Collectives() as step:
        run.optimizer.step()
    assert len(step.calls) == (world.world_size > 1)
    assert all(name == "allreduce" and dtype == torch.float32 for name, _, dtype in step.calls)
    with Collectives() as gather:
        for layer in (run.model.second, run.model.small):
            layer.unshard()
    if world.world_size > 1:  # half a byte an element, and rows that fill up the last shards
        rows = [-(-n // world.world_size) for n in (130, 2)]
        assert [(name, n) for name, n, _ in gather.calls] == [
            ("allgather_base", rows[0] * 22 // 2),
            ("allgather_base", rows[1] * 130 // 2),
        ]
        assert all(dtype == torch.uint8 for *_, dtype in gather.calls)
    reshard(run.model)


class Quantized(nn.Module):
    """Layers of zerofp4.nn."""

    def __init__(self, dtype=None):
        super().__init__()
        self.up = zerofp4.nn.Linear(48, 96, dtype=dtype)
        self.down = zerofp4.nn.Linear(96, 48, bias=False, dtype=dtype)

    def forward(self, x):
        with zerofp4.nn.autocast(zerofp4.nn.NVFP4Recipe(stochastic_rounding=False)):
            return x + self.down(torch.tanh(self.up(x)))


@on_ranks(1, 3)
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_quantized_layers_multiply_what_is_gathered(world, columnwise, reshard_after_forward):
    """Both copies of the weight give the same products; the transposed one is made where a layer reads it."""
    model = make_model(world, model_class=Quantized)
    expected = make_model(world, model_class=Quantized)
    zerofp4.convert_model(expected)
    run = start(world, model=model, columnwise=columnwise, reshard_after_forward=reshard_after_forward)
    names = ("up.weight", "down.weight")
    codes = {"names": names, "columnwise": names if columnwise else (), "as_values": False}
    check_gathered(run.model, **codes)
    batch = batch_of(world, 0, everywhere=True)
    loss = run.backward(batch)
    expected_loss = expected(batch).float().square().mean()
    expected_loss.backward()
    assert loss == expected_loss
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(whole(p.grad), expected.get_parameter(name).grad, msg=name)
    run.optimizer.step()
    check_gathered(run.model, **codes)


@on_ranks(2)
def test_replicas_hold_the_same_codes(world):
    """One all-reduce over the ranks that a weight is sharded over: here each alone."""
    mesh = mesh_of(world, (2, 1), ("replicate", "shard"))
    run = start(world, mesh=mesh)
    run.backward(batch_of(world, 0))
    with Collectives() as step:
        run.optimizer.step()
    assert not step.calls
    check_gathered(run.model)


@on_ranks(4)
def test_a_mesh_of_shards_and_replicas(world):
    run = start(world, mesh=mesh_of(world, (2, 2), ("replicate", "shard")), mp_policy=BF16)
    for step in range(2):
        run.step(batch_of(world, step))
        check_gathered(run.model, torch.bfloat16)


@on_ranks(3)
def test_the_report_names_what_stays(world):
    model = make_model(world, model_class=Model)
    model.lm_head.weight = nn.Parameter(torch.zeros(10, 18))
    model.tied = nn.Linear(18, 10, bias=False)
    model.tied.weight = model.lm_head.weight
    report = fsdp2.prepare(model, take_experts)
    assert [name if name.endswith("stack") else f"{name}.weight" for name in report.converted] == list(
        CONVERTED
    )
    assert report.skipped["tied.weight"] == "it is tied to lm_head.weight"
    assert_bytes_equal(model.first.weight.local, make_model(world).first.weight.detach(), "a master")
