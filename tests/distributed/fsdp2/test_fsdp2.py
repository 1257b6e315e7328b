"""FSDP2 gathers, in 4 bits, the bytes of the quantized master, however a model is sharded and trained."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from cases.fsdp2 import (
    BF16,
    Collectives,
    Model,
    Run,
    check_gathered,
    make_model,
    masters_of,
    mesh_of,
    start,
    take_experts,
    unsharded,
)
from helpers import assert_bytes_equal, collect_garbage
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerofp4
from distributed.run import on_ranks
from zerofp4 import FourOverSix, ops
from zerofp4.integrations import fsdp2
from zerofp4.integrations.fsdp2 import weight as weight_file
from zerofp4.optim import FusedAdamW


def sgd(params) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)


# What is gathered


TILES = {"block": (16, 16)}
ROWS = {"block": (1, 16)}
CHOSEN = {"block": (1, 16), "four_over_six": FourOverSix()}
"""Kinds of weights. Scales of all but TILES are gathered behind the codes."""


@on_ranks(1, 2, 3, nightly=[4])
@pytest.mark.parametrize("kind", [TILES, ROWS, CHOSEN], ids=["tiles", "rows", "four over six"])
@pytest.mark.parametrize("how", ["values", "codes", "bfloat16"])
def test_what_is_gathered_is_the_whole_master_quantized(world, how, kind):
    policy = BF16 if how == "bfloat16" else MixedPrecisionPolicy()
    cls = FusedAdamW if kind != TILES else torch.optim.AdamW
    options = {"reshard_after_forward": how != "codes", "mp_policy": policy}
    run = start(world, kind=kind, optimizer=lambda params: cls(params, lr=0.02), **options)
    expected = {"dtype": policy.param_dtype or torch.float32, "as_values": how != "codes"}
    run.check(**expected)
    before = run.masters()["experts.stack"]
    for step in range(2):
        run.step(step)
        run.check(**expected)
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert not torch.equal(run.masters()["experts.stack"], before)


@on_ranks(2)
def test_weights_of_an_amax_group_share_one(world):
    """In a copy of the model that was prepared, too."""
    names = ("first.weight", "third.weight")
    groups = {"amax_groups": lambda model: [[model.get_parameter(name) for name in names]]}
    run = start(world, wrap=copy.deepcopy, **groups)
    assert repr(run.attachment).startswith("Attachment(5 weights of FSDPModel\n  AdamW: CastPlan(")
    run.step(0)
    masters = run.masters()
    largest = torch.stack([masters[name].abs().max() for name in names]).max()
    run.check(amax={name: largest.view(1) for name in names})


@on_ranks(1, 2, 4)
@pytest.mark.parametrize(("kind", "replicas"), [(TILES, 1), (ROWS, 1), (TILES, 2)])
def test_collectives_of_a_step_and_bytes_of_a_gather(world, kind, replicas):
    """A step makes one all-reduce over the ranks that a weight is sharded over, none for one rank alone."""
    shards = world.world_size // replicas
    if shards == 0:
        return
    mesh = mesh_of(world, (replicas, shards), ("replicate", "shard")) if replicas > 1 else None
    run = start(world, mesh=mesh, kind=kind)
    with Collectives() as backward:
        run.backward(0)
    with Collectives() as step:
        run.optimizer.step()
    with Collectives() as again:
        run.backward(1)
    if replicas == 1:  # between replicas gradients are reduced
        assert not backward.named("allreduce") and not again.named("allreduce")  # only a step casts
    assert len(step.calls) == (shards > 1)
    assert all(name == "allreduce" and dtype == torch.float32 for name, _, dtype in step.calls)
    with Collectives() as gather, unsharded(run.model):
        pass
    run.check()
    if shards > 1:  # half a byte an element, scales, and rows that fill up the last shards
        rows, scales = [-(-n // shards) for n in (130, 2)], (2, 9) if kind == ROWS else (0, 0)
        sizes = [n for name, n, dtype in gather.named("allgather_base") if dtype == torch.uint8]
        expected = [rows[0] * (22 // 2 + scales[0]), rows[1] * (130 // 2 + scales[1])]
        assert sizes[1:3] == expected, gather.calls


class Mlp(nn.Module):
    def __init__(self, linear=nn.Linear, **recipe):
        super().__init__()
        self.up = linear(48, 96)
        self.down = linear(96, 48, bias=False)
        self.recipe = zerofp4.nn.NVFP4Recipe(stochastic_rounding=False, **recipe)

    def forward(self, x):
        with zerofp4.nn.autocast(self.recipe):
            return x + self.down(torch.tanh(self.up(x)))


MLP = ("up.weight", "down.weight")


@on_ranks(2)
def test_layers_multiply_rows_that_are_gathered(world):
    """Gathered again in each pass, into memory that was freed, and with swizzled scales."""

    def rows():
        return Mlp(zerofp4.nn.Linear, weight_block=(1, 16), backward="dequantized")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_file, "has_fp4_tensor_cores", lambda device: True)
        run = start(world, model=make_model(world, model_class=rows), kind=CHOSEN)
        for step in range(3):
            masters = masters_of(run.model)
            with unsharded(run.model) as found:
                for name in MLP:
                    options = CHOSEN | {"stacked": masters[name].dim() == 3}
                    expected = zerofp4.quantize(masters[name], scale_layouts=("swizzled",), **options)
                    for buffer_name, buffer in expected.record.buffers():
                        own = found[name].record.buffer(buffer_name)
                        assert_bytes_equal(own, buffer, f"{name}: {buffer_name}")
            run.step(step)
        run.check(names=MLP, as_values=False)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("columnwise", "has_tensor_cores", "reshards"),
    [(True, False, True), (True, True, False), (False, True, True), (None, True, True), (None, False, True)],
)
def test_quantized_layers_multiply_what_is_gathered(world, columnwise, has_tensor_cores, reshards):
    """Both copies of the weight give the same products; the transposed one is made where a layer reads it."""
    model, expected = (make_model(world, model_class=lambda: Mlp(zerofp4.nn.Linear)) for _ in range(2))
    zerofp4.convert_model(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "has_fp4_tensor_cores", lambda device: has_tensor_cores)
        run = start(world, model=model, columnwise=columnwise, reshard_after_forward=reshards)
    has_columns = has_tensor_cores if columnwise is None else columnwise
    codes = {"names": MLP, "columnwise": MLP if has_columns else (), "as_values": False}
    run.check(**codes)
    plain = Run(world, expected, None, None)
    assert run.backward(0, alike=True) == plain.backward(0, alike=True)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected.get_parameter(name).grad, msg=name)
    run.optimizer.step()
    run.check(**codes)


# Ways of training that change no number


def checkpointed_layers(world) -> Run:
    def wrap(model: nn.Module) -> None:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))

    return start(world, wrap=wrap)


def prefetched(world) -> Run:
    """And with a weight that backward does not gather."""
    run = start(world)
    run.model.first.set_modules_to_forward_prefetch([run.model.second, run.model.small])
    run.model.third.set_modules_to_backward_prefetch([run.model.small, run.model.second])
    run.model.first.set_unshard_in_backward(False)  # nothing asks for the gradient of its input
    return run


def moved_by_fully_shard(world) -> Run:
    torch.manual_seed(0)
    run = start(world, model=Model())
    assert all(p.device == world.device for p in run.model.parameters())
    return run


def symmetric_memory(world) -> Run:
    if world.device.type != "cuda" or not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        pytest.skip("only torch on GPUs has it")
    run = start(world)
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_symm_mem_for_comm()
    return run


def compiled(world) -> Run:
    """By a backend that runs what was traced, operator by operator."""
    run = start(world)
    run.model.third.compile(backend="aot_eager")
    return run


def masters_on_the_cpu(world, kind=None, name="offloaded", **options) -> Run:
    """On a GPU the group needs a backend for the CPU too, and is refused where that is missing."""
    policy, mesh = CPUOffloadPolicy(pin_memory=world.device.type == "cuda"), None
    if world.device.type == "cuda":
        with pytest.raises(ValueError, match=r"init_process_group\('cpu:gloo,cuda:nccl'\)"):
            start(world, offload_policy=policy)
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
        # By another name: DTensor's caches take meshes that differ only in their groups for one.
        mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=(name,))
    run = start(world, mesh=mesh, kind=kind, offload_policy=policy, **options)
    assert all(p.device.type == "cpu" for p in run.model.parameters())
    return run


SAME = [checkpointed_layers, prefetched, moved_by_fully_shard, symmetric_memory]
CLOSE = [pytest.param(compiled, marks=pytest.mark.heavy), masters_on_the_cpu]


@on_ranks(1, 2, time_limit=120.0)
@pytest.mark.parametrize("started", [*SAME, *CLOSE])
def test_ways_of_training_that_change_no_number(world, started):
    run, plain = started(world), start(world)
    exactly = {"rtol": 0, "atol": 0} if started in SAME else {}
    for step in range(2):
        torch.testing.assert_close(run.step(step), plain.step(step), **exactly)
    if started in SAME:  # their order is the same; wrappers change names
        for p, q in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            assert_bytes_equal(p.detach().full_tensor(), q.detach().full_tensor(), "a master")
    if started is not checkpointed_layers:
        run.check()


@on_ranks(1, 2)
@pytest.mark.parametrize("state", ["full", "compact"])
def test_fused_updates_of_masters_on_the_cpu(world, state):
    """They have the bytes of those on the device."""
    options = {"optimizer": lambda params: FusedAdamW(params, lr=0.02, state=state)}
    runs = masters_on_the_cpu(world, name=f"fused_{state}", **options), start(world, **options)
    for run in runs:
        run.inject(range(3))
    offloaded, plain = (run.masters() for run in runs)
    for name, value in plain.items():
        assert_bytes_equal(offloaded[name].to(value.device), value, name)
    runs[0].check()


@on_ranks(1, 2)
def test_scales_of_masters_on_the_cpu_are_gathered(world):
    """Those of each step: a rank that has the whole weight copies them."""
    run = masters_on_the_cpu(world, ROWS, "offloaded_rows")
    for step in range(2):
        run.step(step)
        run.check()


@on_ranks(2)
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_add_up_over_micro_batches(world, keep):
    """Reduced once, and, with `keep`, without resharding and gathering in between."""
    each, once = start(world), start(world, reshard_after_forward=not keep)
    for step in range(2):
        for run in (each, once):
            for part in range(2):
                if run is once:
                    run.model.set_requires_gradient_sync(part == 1)
                    run.model.set_is_last_backward(part == 1)
                    run.model.set_reshard_after_backward(part == 1 or not keep)
                run.backward(2 * step + part)
            run.optimizer.step()
            run.optimizer.zero_grad()
    masters = once.masters()
    for name, value in each.masters().items():
        torch.testing.assert_close(masters[name], value, rtol=1e-3, atol=1e-4)
    once.check(as_values=not keep)


@on_ranks(1, 2)
def test_frozen_weights_are_gathered_too_and_cast_once(world):
    model = make_model(world)
    model.second.requires_grad_(False)
    model.experts.requires_grad_(False)
    run = start(world, model=model, optimizer=sgd)
    before = run.masters()
    for step in range(2):
        run.step(step)
        run.check()
    after = run.masters()
    frozen = [name for name in run.weights() if torch.equal(after[name], before[name])]
    assert frozen == ["second.weight", "experts.stack"]


@on_ranks(2)
def test_steps_leave_no_tensor_behind(world):
    run = start(world, optimizer=lambda params: FusedAdamW(params, lr=0.02))
    counts = {}
    for step in range(6):
        run.step(step)
        if step in (2, 5):
            collect_garbage()
            counts[step] = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
    assert counts[5] <= counts[2]


# What is refused


def across_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 else None


def assert_not_attached(model: nn.Module) -> None:
    assert all(weight.placement is None for *_, weight in fsdp2.prepared_weights(model))


@on_ranks(4)
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("is sharded on dim 1: packed rows are gathered whole", {"shard_placement_fn": across_columns}),
        ("reshard_after_forward=2 keeps a part", {"reshard_after_forward": 2}),
    ],
)
def test_what_cannot_be_gathered_is_refused(world, message, options):
    model = make_model(world, model_class=Mlp)
    with pytest.raises(ValueError, match=message):
        start(world, model=model, optimizer=sgd, **options)
    assert_not_attached(model)


@on_ranks(2, 4)
def test_what_one_rank_cannot_attach_no_rank_does(world):
    """Replicas included."""
    model, last = make_model(world), world.world_size - 1
    mesh = mesh_of(world) if last == 1 else mesh_of(world, (2, 2), ("replicate", "shard"))
    before = sgd(model.parameters())
    with pytest.raises(RuntimeError, match=r"rank 1: 'first.weight' is not a parameter of the optimizer"):
        start(world, model=model, mesh=mesh, optimizer=lambda p: before if world.rank == last else sgd(p))
    assert_not_attached(model)
    after = sgd(model.parameters())
    attachment = fsdp2.attach(model, after)
    check_gathered(model)
    with pytest.raises(RuntimeError, match=r"rank 0: 'first.weight' is attached already"):
        fsdp2.attach(model, after)
    check_gathered(model)
    attachment.detach()


@on_ranks(2)
def test_a_master_that_one_rank_has_lost_stops_all(world):
    run, is_last = start(world), world.rank == world.world_size - 1
    if is_last:
        sharded = run.weights()["second.weight"].placement.param.sharded_param
        sharded._local_tensor = sharded._local_tensor.local
    message = "its parameter was replaced since" if is_last else "another rank could not take part"
    with pytest.raises(RuntimeError, match=message):
        run.attachment.refresh()
        run.attachment.check()


# Several sets of ranks, or several dimensions of one mesh


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
    run = Run(world, model, optimizer, fsdp2.attach(model, optimizer))
    run.check()
    for step in range(2):
        run.step(step, alike=True)
        run.check()
    with Collectives() as collectives:
        run.attachment.refresh()
    assert [name for name, *_ in collectives.calls] == ["allreduce", "allreduce"]


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
    assert fsdp2.prepare(model, **TILES).converted == ["up", "down"]
    modules, options = (model.up, model.down, model), {"reshard_after_forward": reshards}
    for module in modules:
        fully_shard(module, mesh=mesh[names[:-1]], mp_policy=mp_policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = Run(world, model, optimizer, fsdp2.attach(model, optimizer))
    for step in range(3):
        for module in modules:
            module.unshard()
        for name, dim in (("up.weight", 0), ("down.weight", 1)):
            own = masters[name].chunk(2, dim)[mesh["tensor"].get_local_rank()].contiguous().to(dtype)
            values = model.get_parameter(name).to_local()
            assert_bytes_equal(values, zerofp4.quantize(own).dequantize(), f"{name} before step {step}")
        for module in modules:
            module.reshard()
        run.step(step, alike=True)
        masters = run.masters()
