"""Weights that are gathered while the next forward pass runs: the bytes of a step that waits for all."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from matrix_cases import MUON
from optim_cases import make_gradients, set_gradients

import zerofp4
from distributed.checks_optim import check_weights, model_bytes, refuse_one_step
from distributed.forward_cases import READS, late_gathers, make_pair, quantized
from distributed.overlap_cases import CLASSES, SMALL, assert_same, loss_of, make
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def step_of(world, models, step, **options):
    for net, optimizer in models:
        loss_of(net, world, step, **options).backward()
        optimizer.step()
        optimizer.zero_grad()


def take_steps(world, models, steps, clip=False, alike=False):
    """alike: whether all ranks compute with the same layers."""
    for step in range(steps):
        for net, optimizer in models:
            options = {"rare": (step + world.rank * (not alike)) % 3 > 0, "checkpointed": step % 2 > 0}
            loss_of(net, world, step, **options).backward()
            if clip:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "overlap"), [("AdamW", "both"), ("FusedAdamW", "forward"), ("FusedAdamW", "both")]
)
def test_the_bytes_of_a_step_without_overlap(world, name, overlap):
    models = make_pair(world, name, overlap)
    take_steps(world, models, 8, clip=name == "AdamW")
    assert_same(models, "8 steps")
    check_weights(list(models[1][0].parameters()), models[1][1])


@on_ranks(2)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_the_same_where_they_arrive_late(world, name, overlap):
    models = make_pair(world, name, overlap)
    with late_gathers():
        take_steps(world, models[1:], 4, alike=True)
    take_steps(world, models[:1], 4, alike=True)
    assert_same(models, "4 steps")


@on_ranks(2)
def test_muon(world):
    models = []
    for overlap in (None, "forward"):
        net, _ = make(world)
        weights = [(n, p) for n, p in net.named_parameters() if isinstance(p, zerofp4.NVFP4Tensor)]
        others = [(n, p) for n, p in net.named_parameters() if not isinstance(p, zerofp4.NVFP4Tensor)]
        beside = {"optimizer_class": FusedAdamW, "lr": 0.01, "weight_decay": 0.1}
        groups = [{"params": weights}, {"params": others, **beside}]
        options = {"bucket_mb": SMALL, "overlap": overlap, **MUON}
        models.append((net, ZeroFP4Optimizer(groups, torch.optim.Muon, **options)))
    with late_gathers():
        take_steps(world, models[1:], 3, alike=True)
    take_steps(world, models[:1], 3, alike=True)
    expected, found = [model_bytes(list(net.parameters())) for net, _ in models]
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_bytes_equal(mine, theirs, f"tensor {i}")


@on_ranks(2)
@pytest.mark.parametrize("read", READS)
def test_each_read_waits(world, read):
    models = make_pair(world)
    step_of(world, models[:1], 0)
    with late_gathers() as begun:
        step_of(world, models[1:], 0)
        expected, late = [quantized(net) for net, _ in models]
        if world.device.type == "cpu":
            places = [weight.record.rowwise.place for weight in late]
            stale = [not p.equal(e.rowwise_data) for p, e in zip(places, expected, strict=True)]
            assert not begun and all(stale)
        found, wanted = READS[read](models[1][0]), READS[read](models[0][0])
    assert len(found) == len(wanted) > 0
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert_bytes_equal(mine, theirs, f"{read} {i}")


@on_ranks(2)
def test_what_was_taken_before_the_step_waits_as_well(world):
    """A detached weight, and the matrices of a stack."""
    nets = []
    for overlap in (None, "forward"):
        torch.manual_seed(1)
        values = torch.randn(3, 32, 48, dtype=torch.bfloat16).to(world.device)
        stack = torch.nn.Parameter(zerofp4.quantize(values, columnwise=True))
        optimizer = ZeroFP4Optimizer([stack], FusedAdamW, lr=0.02, overlap=overlap, transport="collective")
        taken = [stack.detach(), stack.data, *stack.detach().unbind(), stack.detach()[1]]
        with late_gathers():
            set_gradients([stack], make_gradients([stack], world.rank))
            optimizer.step()
            # Its matrices, and nothing of it before.
            nets.append([each.columnwise_data.clone() for each in reversed(taken)])
    for i, (theirs, mine) in enumerate(zip(*nets, strict=True)):
        assert_bytes_equal(mine, theirs, f"tensor {i}")


@on_ranks(2, 3)
def test_other_parameters_are_complete_when_a_step_returns(world):
    """And so are scales and amaxes, which do not travel."""
    models = make_pair(world)
    step_of(world, models[:1], 0)
    with late_gathers() as begun:
        step_of(world, models[1:], 0)
        there = [[p for p in net.parameters() if type(p) is torch.nn.Parameter] for net, _ in models]
        for i, (theirs, mine) in enumerate(zip(*there, strict=True)):
            assert_bytes_equal(mine.detach(), theirs.detach(), f"parameter {i}")
        for i, (theirs, mine) in enumerate(zip(*(quantized(net) for net, _ in models), strict=True)):
            assert_bytes_equal(mine.rowwise_scale, theirs.rowwise_scale, f"scales of weight {i}")
            assert_bytes_equal(mine.amax, theirs.amax, f"amax of weight {i}")
            assert mine.nbytes == theirs.nbytes
        optimizer = models[1][1]
        optimizer.describe(), optimizer.state_dict(), repr(optimizer), repr(models[1][0])
        assert world.device.type != "cpu" or not begun
    assert_same(models, "a step")


@on_ranks(2)
def test_a_read_waits_for_the_bucket_of_its_weight_alone(world):
    net, optimizer = make(world, overlap="forward", bucket_mb=1e-4)
    kinds = [bucket["kind"] for bucket in optimizer.describe()["buckets"]]
    others = kinds.index("nvfp4")
    assert kinds[others:] == ["nvfp4"] * (len(kinds) - others) and others > 0  # in the order of reads
    with late_gathers() as begun:
        step_of(world, [(net, optimizer)], 0)
        if world.device.type == "cuda":  # streams wait, and not the host
            return
        packed = optimizer._shards.buffers[others:]
        net.layers[1].weight.dequantize()
        net.layers[1].weight.dequantize()
        assert begun == [packed[1]]
        net.head.weight.rowwise_data  # noqa: B018
        optimizer.check()
        assert begun == [packed[1], packed[-1], packed[0], *packed[2:-1]]


@on_ranks(2, 3)
def test_steps_without_a_read_between_them(world):
    """With injected gradients; and check() after some, and a skipped step."""
    models = make_pair(world)
    for step in range(5):
        for net, optimizer in models:
            parameters = list(net.parameters())
            set_gradients(parameters, make_gradients(parameters, 10 * step + world.rank))
            if step == 3:
                parameters[2].grad[0] = torch.nan
            optimizer.step()
            if step == 1:
                optimizer.check()
        assert models[1][1].found_inf.item() == (step == 3)
    assert_same(models, "5 steps")


@on_ranks(2)
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_both_with_micro_batches(world, accumulate):
    """As with overlap="backward" alone."""
    models = [make(world, overlap=o, accumulate=accumulate, bucket_mb=SMALL) for o in ("backward", "both")]
    with late_gathers():
        for step in range(4):
            for net, optimizer in models:
                if accumulate == "local":
                    with optimizer.no_sync():
                        loss_of(net, world, 10 * step).backward()
                else:
                    loss_of(net, world, 10 * step).backward()
                loss_of(net, world, 10 * step + 1, rare=False).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert_same(models, "4 steps")


@on_ranks(2)
def test_a_backward_pass_through_the_old_values_fails_at_once(world):
    """Before anything has arrived."""
    net, optimizer = make(world, overlap="forward", bucket_mb=SMALL)
    loss, old = loss_of(net, world, 0), loss_of(net, world, 1)
    loss.backward()
    with late_gathers() as begun:
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        assert world.device.type != "cpu" or not begun
        optimizer.check()


@on_ranks(2, 3)
def test_a_rank_that_cannot_publish_one_bucket_holds_up_nobody(world):
    """Weights from that bucket on keep their bytes on every rank; all gathers arrive, and a load goes on."""
    net, optimizer = make(world, overlap="forward", bucket_mb=1e-4)
    checkpoint, shards = copy.deepcopy(optimizer.state_dict()), optimizer._shards
    chosen = shards.plans.index(next(plan for plan in shards.plans if plan is not None))
    plan, members = shards.plans[chosen], shards.buffers[chosen].parameters
    if world.rank == 1:
        refuse_one_step(plan)
    before = [buffer.clone() for buffer in model_bytes(members)]
    with late_gathers():
        loss_of(net, world, 0).backward()
        if world.device.type == "cpu" or world.rank == 1:
            message = "storage has moved" if world.rank == 1 else "another rank could not take part"
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
        else:
            optimizer.step()
            with pytest.raises(RuntimeError, match="another rank could not take part"):
                optimizer.check()
        for mine, kept in zip(model_bytes(members), before, strict=True):
            assert_bytes_equal(mine, kept, "of that bucket")
        optimizer.zero_grad()
        optimizer.load_state_dict(checkpoint)
        step_of(world, [(net, optimizer)], 1)
    check_weights(list(net.parameters()), optimizer)


@on_ranks(2)
def test_what_waits_is_freed_when_it_was_read(world):
    net, optimizer = make(world, overlap="forward", bucket_mb=SMALL)
    with late_gathers():
        step_of(world, [(net, optimizer)], 0)
    pending = [weakref.ref(arrival) for arrival in optimizer._shards._late._pending]
    assert len(pending) > 1
    optimizer.check()
    gc.collect()
    assert not any(reference() for reference in pending)


@on_ranks(2)
def test_a_group_that_is_destroyed_before_its_weights_are_read(world):
    group = dist.new_group()
    models = [make(world, overlap=o, bucket_mb=SMALL, process_group=group) for o in (None, "forward")]
    step_of(world, models, 0)
    dist.barrier()
    dist.destroy_process_group(group)
    found = [model_bytes(list(net.parameters())) for net, _ in models]
    for i, (theirs, mine) in enumerate(zip(*found, strict=True)):
        assert_bytes_equal(mine, theirs, f"tensor {i}")


@on_ranks(2)
def test_one_optimizer_goes_on_from_another(world):
    """Whose weights are still on their way."""
    models = []
    for overlap in (None, "forward"):
        net, first = make(world, overlap=overlap, bucket_mb=SMALL)
        with late_gathers():
            step_of(world, [(net, first)], 0)
            options = {"lr": 0.02, "overlap": overlap, "bucket_mb": 1e-4, "transport": "collective"}
            second = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, masters_from=first, **options)
            step_of(world, [(net, second)], 1)
        models.append((net, second))
    assert_same(models, "the end")


@on_ranks(2)
def test_states_that_are_loaded_and_addresses_that_are_taken_anew(world):
    models = make_pair(world)
    for net, optimizer in models:
        with late_gathers():
            step_of(world, [(net, optimizer)], 0)
            state = optimizer.state_dict()
            step_of(world, [(net, optimizer)], 1)
            optimizer.load_state_dict(state)
            optimizer.refresh()
            step_of(world, [(net, optimizer)], 2)
    assert_same(models, "the end")


@on_ranks(2, 3)
def test_groups_of_some_ranks(world):
    """Of two ranks and of one, which has nothing to gather: each group's weights are left behind its own."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2])[: world.world_size - 1]]
    own = groups[world.rank // 2]
    models = []
    for overlap in (None, "forward"):
        net, _ = make(world)
        experts = {"params": list(net.layers[1:3].named_parameters()), "process_group": own}
        others = [(n, p) for n, p in net.named_parameters() if not n.startswith(("layers.1", "layers.2"))]
        options = {"lr": 0.02, "overlap": overlap, "bucket_mb": 1e-4}
        models.append((net, ZeroFP4Optimizer([{"params": others}, experts], FusedAdamW, **options)))
    for step in range(4):
        step_of(world, models, step)
    for i, (theirs, mine) in enumerate(
        zip(*(model_bytes(list(n.parameters())) for n, _ in models), strict=True)
    ):
        assert_bytes_equal(mine, theirs, f"tensor {i}")


@on_ranks(2)
def test_all_is_complete_where_no_step_ends(world):
    """When an optimizer was built, and when it has loaded a state."""
    with late_gathers() as begun:
        net, optimizer = make(world, overlap="forward", bucket_mb=SMALL)
        count = sum(bucket["kind"] == "nvfp4" for bucket in optimizer.describe()["buckets"])
        assert len(begun) == count > 1
        optimizer.load_state_dict(optimizer.state_dict())
        assert len(begun) == 2 * count
        step_of(world, [(net, optimizer)], 0)
        # First the weights follow the masters that were loaded.
        assert world.device.type == "cuda" or len(begun) == 3 * count
        optimizer.check()
        assert len(begun) == 4 * count


@on_ranks(1, 2)
def test_describe(world):
    for overlap in (None, "forward", "both"):
        _, optimizer = make(world, overlap=overlap, bucket_mb=SMALL)
        described = optimizer.describe()
        assert described["overlap"] == overlap
        late = "step" if overlap is None else "forward"
        for bucket in described["buckets"]:
            where = late if bucket["kind"] == "nvfp4" else "step"
            assert bucket["gathered_in"] == (where if world.world_size > 1 else None)
    optimizer.check()


@on_ranks(2)
@pytest.mark.parametrize("overlap", ["forward", "both"])
def test_ranks_must_overlap_alike(world, overlap):
    with pytest.raises(ValueError, match="overlap and accumulate is"):
        make(world, overlap=overlap if world.rank else None)


@on_ranks(2)
def test_a_parameter_that_moved_is_found_by_check(world):
    net, optimizer = make(world, overlap="forward", bucket_mb=SMALL)
    optimizer.check()
    weight = quantized(net)[0]
    weight.rowwise_data = weight.rowwise_data.clone()
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight': rowwise_data has moved"):
        optimizer.check()
    optimizer.refresh()
    optimizer.check()
