"""Ways of sharding and of training that FSDP2 has, with gathers in 4 bits."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from fsdp2_cases import (
    CONVERTED,
    Model,
    Run,
    assert_same_masters,
    batch_of,
    check_gathered,
    make_model,
    mesh_of,
    reshard,
    shard,
    start,
    take_experts,
    whole,
)
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zerofp4
from distributed.run import on_ranks
from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def accumulate(run: Run, world, steps: int, set_up=lambda model, is_last: None) -> None:
    """Steps of two micro-batches."""
    for step in range(steps):
        for part in range(2):
            set_up(run.model, part == 1)
            run.backward(batch_of(world, 2 * step + part))
        run.optimizer.step()
        run.optimizer.zero_grad()


@on_ranks(2, 3)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_add_up_over_micro_batches(world, keep):
    """Reduced once, and, with `keep`, without resharding and gathering in between."""

    def set_up(model: FSDPModule, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        if keep:
            model.set_reshard_after_backward(is_last)

    each, once = start(world), start(world, reshard_after_forward=not keep)
    accumulate(each, world, 2)
    accumulate(once, world, 2, set_up)
    for name, value in each.model.state_dict().items():
        torch.testing.assert_close(whole(once.model.state_dict()[name]), whole(value), rtol=1e-3, atol=1e-4)
    check_gathered(once.model, as_values=not keep)


@on_ranks(2)
def test_prefetching_and_weights_that_backward_does_not_gather(world):
    run, plain = start(world), start(world)
    run.model.first.set_modules_to_forward_prefetch([run.model.second, run.model.small])
    run.model.third.set_modules_to_backward_prefetch([run.model.small, run.model.second])
    run.model.first.set_unshard_in_backward(False)  # nothing asks for the gradient of its input
    for step in range(2):
        assert run.step(batch_of(world, step)) == plain.step(batch_of(world, step))
    assert_same_masters(run.model, plain.model)


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@on_ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_activation_checkpointing(world, wrapped):
    if wrapped:
        model = make_model(world)
        fsdp2.prepare(model, take_experts)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        shard(model, mesh_of(world))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        run = Run(model, optimizer, fsdp2.attach(model, optimizer))
    else:
        run = start(world, model=make_model(world, model_class=Checkpointed))
    plain = start(world)
    for step in range(2):
        assert run.step(batch_of(world, step)) == plain.step(batch_of(world, step))
    for p, q in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert_bytes_equal(whole(p.detach()), whole(q.detach()), "a master")


@on_ranks(1, 3)
def test_frozen_weights_are_gathered_too_and_cast_once(world):
    model = make_model(world)
    model.second.requires_grad_(False)
    model.experts.requires_grad_(False)
    run = start(
        world,
        model=model,
        optimizer=lambda params: torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1),
    )
    state = {name: whole(value).clone() for name, value in run.model.state_dict().items()}
    for step in range(2):
        run.step(batch_of(world, step))
        check_gathered(run.model)
    after = run.model.state_dict()
    frozen = ("second.weight", "experts.stack")
    assert all(torch.equal(whole(after[name]), state[name]) == (name in frozen) for name in CONVERTED)


@on_ranks(1, 2)
def test_masters_on_the_cpu(world):
    """On a GPU the group needs a backend for the CPU too, which is refused where it is missing."""
    policy, mesh = CPUOffloadPolicy(pin_memory=world.device.type == "cuda"), None
    if world.device.type == "cuda":
        with pytest.raises(ValueError, match=r"init_process_group\('cpu:gloo,cuda:nccl'\)"):
            start(world, offload_policy=policy)
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
        # By another name: DTensor's caches take meshes that differ only in their groups for one.
        mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("offloaded",))
    run, plain = start(world, mesh=mesh, offload_policy=policy), start(world)
    for step in range(2):
        torch.testing.assert_close(run.step(batch_of(world, step)), plain.step(batch_of(world, step)))
    assert all(p.device.type == "cpu" for p in run.model.parameters())
    check_gathered(run.model)


@on_ranks(2)
def test_fully_shard_moves_a_prepared_model(world):
    torch.manual_seed(0)
    run, plain = start(world, model=Model()), start(world)
    assert all(p.device == world.device for p in run.model.parameters())
    assert run.step(batch_of(world, 0)) == plain.step(batch_of(world, 0))
    check_gathered(run.model)


@on_ranks(2)
def test_symmetric_memory(world):
    """Where torch has it, on GPUs: it gathers what it gathers without."""
    run, plain = start(world), start(world)
    if world.device.type == "cuda" and hasattr(FSDPModule, "set_symm_mem_for_comm"):
        for module in run.model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()
    for step in range(2):
        assert run.step(batch_of(world, step)) == plain.step(batch_of(world, step))
    check_gathered(run.model)


class Mlp(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.up = nn.Linear(48, 96, bias=False, dtype=dtype)
        self.down = nn.Linear(96, 48, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


@on_ranks(4)
@pytest.mark.parametrize("mp_policy", [MixedPrecisionPolicy(), BF16])
def test_a_slice_of_tensor_parallelism_is_a_weight_of_its_own(world, mp_policy):
    mesh = mesh_of(world, (2, 2), ("shard", "tensor"))
    model, plain = (make_model(world, model_class=Mlp) for _ in range(2))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    assert fsdp2.prepare(model).converted == ["up", "down"]
    shard(model, mesh["shard"], mp_policy=mp_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = Run(model, optimizer, fsdp2.attach(model, optimizer))
    dtype = mp_policy.param_dtype or torch.float32
    place = mesh["tensor"].get_local_rank()
    for step in range(2):
        for module in (model, model.up, model.down):
            module.unshard()
        for name, dim in (("up.weight", 0), ("down.weight", 1)):
            slice_ = masters[name].chunk(2, dim)[place].contiguous().to(dtype)
            values = model.get_parameter(name).to_local()
            assert_bytes_equal(values, zerofp4.quantize(slice_).dequantize(), name)
        reshard(model)
        run.step(batch_of(world, step, everywhere=True))
        masters = {name: whole(value) for name, value in model.state_dict().items()}
    assert not torch.equal(masters["up.weight"], plain.up.weight)


@pytest.mark.heavy
@on_ranks(2, time_limit=120.0)
def test_compiled_blocks(world):
    """By a backend that runs what was traced, operator by operator."""
    run, plain = start(world), start(world)
    run.model.third.compile(backend="aot_eager")
    for step in range(2):
        torch.testing.assert_close(run.step(batch_of(world, step)), plain.step(batch_of(world, step)))
    check_gathered(run.model)


@on_ranks(2)
def test_steps_leave_no_tensor_behind(world):
    run = start(world, optimizer=lambda params: FusedAdamW(params, lr=0.02))
    counts = {}
    for step in range(6):
        run.step(batch_of(world, step))
        if step in (2, 5):
            gc.collect()
            counts[step] = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    assert counts[5] <= counts[2]


def refusals(world):
    mesh = mesh_of(world)
    yield (
        "is sharded on dim 1: packed rows are gathered whole",
        functools.partial(shard, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None),
        Mlp,
    )
    yield (
        "reshard_after_forward=2 keeps a part",
        functools.partial(shard, mesh=mesh, reshard_after_forward=2),
        Mlp,
    )


@on_ranks(4)
def test_what_cannot_be_gathered_is_refused(world):
    for message, cut, model_class in refusals(world):
        model = make_model(world, model_class=model_class)
        fsdp2.prepare(model)
        cut(model)
        with pytest.raises(ValueError, match=message):
            fsdp2.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(weight.placement is None for *_, weight in fsdp2.state.prepared_weights(model))


@on_ranks(2, 3)
def test_what_one_rank_cannot_attach_no_rank_does(world):
    last = world.world_size - 1
    model = make_model(world)
    fsdp2.prepare(model, take_experts)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, mesh_of(world))
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        RuntimeError, match=f"rank {last}: 'first.weight' is not a parameter of the optimizer"
    ):
        fsdp2.attach(model, before if world.rank == last else after)
    assert all(weight.placement is None for *_, weight in fsdp2.state.prepared_weights(model))
    attachment = fsdp2.attach(model, after)
    check_gathered(model)
    with pytest.raises(RuntimeError, match=r"rank 0: 'first.weight' is attached already"):
        fsdp2.attach(model, after)
    check_gathered(model)
    attachment.detach()


@on_ranks(4)
def test_replicas_hear_of_what_a_rank_cannot_attach(world):
    model = make_model(world)
    fsdp2.prepare(model, take_experts)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, mesh_of(world, (2, 2), ("replicate", "shard")))
    after = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"'first.weight' is not a parameter of the optimizer"):
        fsdp2.attach(model, before if world.rank == 3 else after)
    fsdp2.attach(model, after)
    check_gathered(model)


@on_ranks(2)
def test_a_master_that_one_rank_has_lost_stops_all(world):
    run, is_last = start(world), world.rank == world.world_size - 1
    if is_last:
        weight = next(w for *_, w in fsdp2.state.prepared_weights(run.model) if w.name == "second.weight")
        sharded = weight.placement.param.sharded_param
        sharded._local_tensor = sharded._local_tensor.local
    message = "its parameter was replaced since" if is_last else "another rank could not take part"
    with pytest.raises(RuntimeError, match=message):
        run.attachment.refresh()
        run.attachment.check()
