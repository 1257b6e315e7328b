"""overlap="update" of several ranks: backward passes exchange, update, cast and gather each bucket."""

import contextlib
import copy
import datetime
import io
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_parameters

from distributed.cases import is_last
from distributed.engine.file_peers import sharing_files
from distributed.engine.overlap_cases import assert_same, break_off, nothing_changes
from distributed.engine.peer_checks import gpu_of
from distributed.engine.update_cases import (
    OPTIONS,
    SERVED,
    SMALL,
    TINY,
    loss_of,
    make,
    make_pair,
    moved,
    step_of,
)
from distributed.optim.cases import check_weights
from distributed.run import on_ranks
from zerofp4 import ops
from zerofp4.distributed import CollectiveError
from zerofp4.ops import tensor_lists
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.testing import verify_model

FOUND = "found an error, and no rank takes this step"


def on_gpu(world, **options):
    """Of ranks that share memory, with early updates and without."""
    alike = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=gpu_of(world))
    models = make_pair(alike, transport="peer", **options)
    assert models[1][1].describe()["transport"] == "peer"
    whole_steps(alike, models)


def whole_steps(world, models):
    """Of real gradients: of a parameter that only some ranks use, of recomputed segments, of ranks without a
    backward pass; and checkpoints that the one takes over from the other.
    """
    before = models[0][1].state_dict()["steps"]
    for step in range(5):
        rare = (step + world.rank) % 3 > 0
        reentrant = (None, False, True)[step % 3]
        for net, optimizer in models:
            if step != 3 or world.rank:
                loss_of(net, world, step, rare=rare, reentrant=reentrant, shared=not reentrant).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")
        if step == 2:
            states = [optimizer.state_dict() for _, optimizer in models]
            for (_, optimizer), state in zip(models, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    for net, optimizer in models:
        assert optimizer.state_dict()["steps"] == 5 + before
        verify_model(net, optimizer, process_group=optimizer.process_group())


WAYS = [
    {},
    {"state": "compact"},
    {"state": "compact", "bucket_mb": SMALL},
    {"bucket_mb": None},
    *({"blocks": blocks} for blocks in SERVED),
    # Those that no update can add up are averaged in memory that all buckets share.
    *(
        {"bucket_mb": SMALL, **dtypes}
        for dtypes in (
            {"gradient_dtype": torch.float32},
            {"gradient_wire": torch.float32},
            {"gradient_dtype": torch.float32, "gradient_wire": torch.bfloat16},
            {"gradient_wire": torch.float16},
            {"reduction": "reduce_scatter"},
        )
    ),
]


@on_ranks(1, 2, nightly=[3], time_limit=120)
@pytest.mark.parametrize("options", WAYS)
def test_the_bytes_of_a_plain_step(world, options):
    whole_steps(world, make_pair(world, **{"bucket_mb": TINY, "transport": "collective", **options}))


@contextlib.contextmanager
def with_peers(world, late=True, **options):
    """Ranks on the CPU that share memory in files: a plain model by collectives, and one with updates."""
    with sharing_files(world, late) as (alone, group):
        options = {"bucket_mb": TINY, "process_group": group, **options}
        plain = make(alone, None, transport="collective", **options)
        models = [plain, make(alone, "update", transport="peer", **options)]
        assert models[1][1].describe()["transport"] == "peer"
        yield alone, models


@on_ranks(2, nightly=[3], time_limit=120)
@pytest.mark.parametrize(
    ("late", "options"),
    [
        (True, {}),
        (False, {"state": "compact"}),
        (True, {"bucket_mb": SMALL, "gradient_wire": torch.float16}),
    ],
)
def test_ranks_that_share_memory(world, late, options):
    with with_peers(world, late, **options) as (alone, models):
        if not options:  # three buckets of it are enough
            buckets = [bucket["gradients"] for bucket in models[1][1].describe()["buckets"]]
            weights = sum(bucket.weights.nbytes for bucket in models[1][1]._shards.buckets)
            assert models[1][1]._peers.nbytes - weights <= 3 * 2 * max(buckets) < sum(buckets)
        whole_steps(alone, models)


@on_ranks(2)
def test_a_rank_that_is_ahead_overwrites_nothing(world):
    """It has sent the next bucket but one before the other rank reads the present one."""
    with with_peers(world) as (_, models):
        parameters, optimizer = list(models[1][0].parameters()), models[1][1]
        exchanges, group = optimizer._step.exchanges, optimizer.process_group()

        def send(b):
            if b < len(exchanges):
                bucket, value = exchanges[b].bucket, float(b + world.rank)
                shapes = [parameters[i].shape for i in bucket.indices]
                exchanges[b].send([torch.full(shape, value, dtype=bucket.sent_as) for shape in shapes])

        send(0)
        send(1)
        for b, exchange in enumerate(exchanges):
            bucket = exchange.bucket
            rows, means = exchange.receive().rows[0], torch.empty(bucket.slice_numel)
            if world.rank:
                dist.barrier(group)
            ops.average(rows, means)
            send(b + 2)
            if not world.rank:
                dist.barrier(group)
            assert all((mean == b + 0.5).all() for mean in bucket.own_views(means) if mean is not None), b
        assert optimizer._peers.log == ["arrive"] * len(exchanges)


@on_ranks(2, 3, time_limit=60)
def test_a_gradient_that_is_missing_on_one_rank(world):
    """The others have it when the pass of that rank ends, not when it calls step(), so that ranks may call
    other collectives in between.
    """
    models = make_pair(world, bucket_mb=TINY, transport="collective", process_group=dist.new_group())
    for step in range(3):
        for net, optimizer in models:
            loss = loss_of(net, world, step, rare=step % 2 != world.rank % 2)
            loss.backward()
            dist.all_reduce(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(2)
def test_a_second_backward_pass_of_other_parameters(world):
    """The first one has taken their buckets."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective")
    loss_of(net, world, 0, rare=False).backward()
    with pytest.raises(RuntimeError, match=r"rare.weight.* got a gradient in a second backward pass"):
        net.rare(torch.ones(1, 64, dtype=torch.bfloat16, device=world.device)).sum().backward()
    assert optimizer.broken is not None


@on_ranks(1, 2)
def test_a_backward_pass_in_a_closure(world):
    models = make_pair(world, bucket_mb=TINY, transport="collective")
    for step in range(2):
        for net, optimizer in models:

            def closure(net=net, optimizer=optimizer, seed=step):
                optimizer.zero_grad()
                loss = loss_of(net, world, seed, rare=world.rank != seed)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        assert_same(models, f"step {step}")


# Memory


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("reduction", ["ordered", "reduce_scatter"])
@pytest.mark.parametrize("reentrant", [None, False])
def test_no_more_than_a_bucket_of_gradients_lives(world, reduction, reentrant):
    """As hooks see it that come behind those of the optimizer; and a model has no other memory for them."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective", reduction=reduction)
    parameters = list(net.parameters())
    alive = []

    def count(_):
        alive.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))

    for p in parameters:
        p.register_post_accumulate_grad_hook(count)
    loss_of(net, world, 0, reentrant=reentrant).backward()
    assert len(alive) == len(parameters) and max(alive) <= 2 * max(p.numel() for p in parameters)
    assert all(p.grad is None for p in parameters)
    optimizer.step()
    own = [e.memory.flat.untyped_storage() for e in optimizer._step.exchanges if e.memory is not None]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())
    assert held <= 2 * 2 * max(p.numel() + 256 * world.world_size for p in parameters)
    if reduction == "ordered":  # no FP32 slice either
        assert not any("gradients" in vars(bucket) for bucket in optimizer._shards.buckets)


@on_ranks(1, 2)
def test_the_host_looks_at_each_parameter_a_few_times(world):
    """And not at all of them for each bucket."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective")
    count, looks = len(optimizer.describe()["buckets"]), []

    def counting(function):
        return lambda tensors: looks.append(len(tensors)) or function(tensors)

    with contextlib.ExitStack() as patches:
        for module, name in ((tensor_lists, "versions_of"), (ops, "gradients_of")):
            patches.enter_context(mock.patch.object(module, name, counting(getattr(module, name))))
        step_of(world, [(net, optimizer)], 0)
    assert len(looks) > count == len(list(net.parameters()))
    assert sum(looks) < 13 * count, sum(looks)


# NaN and Inf


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_buckets_with_a_nan_or_inf_on_one_rank(world, bad):
    """They are left out on all of them, and no others are."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective")
    step_of(world, [(net, optimizer)], 0)
    before = [master.clone() for master in optimizer.gathered_masters()]
    factor = bad if is_last(world) else 1
    hooks = [net.layers[i].weight.register_hook(lambda g: g * factor) for i in (2, 0)]
    loss_of(net, world, 1).backward()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    everything = {name for name, _ in net.named_parameters()}
    assert moved(net, optimizer, before) == everything - {"layers.0.weight", "layers.2.weight"}
    assert optimizer.found_inf.item() == 1 and optimizer.skipped_steps == 1
    assert "layers.0.weight" in optimizer.first_nonfinite()
    check_weights(list(net.parameters()), optimizer)
    step_of(world, [(net, optimizer)], 2)
    assert moved(net, optimizer, before) == everything
    assert optimizer.found_inf.item() == 0 and optimizer.skipped_steps == 1
    assert optimizer.first_nonfinite() is None


# Errors


def of_last_rank(world, mine, others=FOUND):
    """Around a call that raises on every rank: what the last one found, and what the others are told."""
    return pytest.raises((ValueError, RuntimeError), match=mine if is_last(world) else others)


@on_ranks(1, 2, 3)
def test_an_error_of_one_rank_before_the_first_update(world):
    """Nothing changes on any rank, and all raise in step(), where hosts read agreements."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective")
    optimizer._agreement.defers = False
    step_of(world, [(net, optimizer)], 0)
    with nothing_changes(net, optimizer):
        if is_last(world):
            optimizer.param_groups[0]["lr"] = math.nan
        loss_of(net, world, 1).backward()
        assert world.world_size > 1 or all(p.grad is not None for p in net.parameters())
        with of_last_rank(world, "must be finite"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
    assert optimizer.broken is None and optimizer._saved.steps == 1
    if world.world_size == 1:
        optimizer.step()  # of the same gradients
    else:
        optimizer.zero_grad()
        step_of(world, [(net, optimizer)], 2)
    assert optimizer._saved.steps == 2


def pass_that_writes(world, net, seed):
    """A backward pass. The last rank writes to a bias behind the first updates, and before its own."""

    def write(_):
        if is_last(world):
            with torch.no_grad():
                net.layers[1].bias.zero_()  # layers.0 comes last

    hook = net.layers[2].weight.register_hook(write)
    loss_of(net, world, seed).backward()
    hook.remove()


def breaks_and_is_mended(world, net, optimizer):
    """No rank updates another bucket; all are broken, and a checkpoint mends them."""
    optimizer._agreement.defers = False
    step_of(world, [(net, optimizer)], 0)
    good = copy.deepcopy(optimizer.state_dict())
    before = [master.clone() for master in optimizer.gathered_masters()]
    pass_that_writes(world, net, 1)
    with of_last_rank(world, r"layers.1.bias.* was written to"):
        optimizer.step()
    assert optimizer.broken is not None
    changed = moved(net, optimizer, before)
    assert {"rare.weight", "layers.3.weight"} <= changed and "layers.0.weight" not in changed
    with pytest.raises(RuntimeError, match="of no more use"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="must not be saved"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    optimizer.zero_grad()
    optimizer.load_state_dict(good)
    assert_all_equal(optimizer.gathered_masters(), before, "masters")
    step_of(world, [(net, optimizer)], 2)
    check_weights(list(net.parameters()), optimizer)


@on_ranks(1, 2, nightly=[3])
def test_an_error_of_one_rank_behind_the_first_update(world):
    breaks_and_is_mended(world, *make(world, bucket_mb=TINY, transport="collective"))


@on_ranks(2, nightly=[3])
def test_an_error_behind_the_first_update_of_ranks_that_share_memory(world):
    with with_peers(world) as (alone, models):
        breaks_and_is_mended(alone, *models[1])


@on_ranks(2, time_limit=120)
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("where", ["rare", "layers.2", "layers.0"])
def test_a_backward_pass_that_raises_on_one_rank(world, where, defers):
    """step() ends the step there, as the pages advise, with the gradients that the pass has made: in `rare`
    none. After zero_grad() with those that were sent. A load behind it undoes it.
    """
    models = make_pair(world, bucket_mb=TINY, transport="collective", process_group=dist.new_group())
    models[1][1]._agreement.defers = defers
    step_of(world, models, 0)
    net, optimizer = models[1]
    good = copy.deepcopy(optimizer.state_dict())
    for drops in (False, True):
        for net, optimizer in models:
            break_off(net, world, where if world.rank == 1 else None)
            if drops:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        if not drops:
            assert_same(models, "the step of the broken pass")
    assert optimizer.broken is None
    check_weights(list(net.parameters()), optimizer)
    for _, optimizer in models:
        optimizer.load_state_dict(good)
    step_of(world, models, 2)
    assert_same(models, "after the load")


@on_ranks(2, time_limit=120)
@pytest.mark.parametrize("way", ["behind the load", "before it", "no backward pass"])
def test_a_load_between_a_backward_pass_and_its_step(world, way):
    """What has begun to travel ends, also of a pass that one rank alone has begun with. zero_grad() drops
    what has not, behind the load or before it.
    """
    models = make_pair(world, bucket_mb=TINY, transport="collective")
    step_of(world, models, 0)
    net, optimizer = models[1]
    if way != "no backward pass":  # rank 1 has no bucket that is complete
        loss_of(net, world, 1, rare=world.rank == 0).backward()
    elif world.rank == 0:
        loss_of(net, world, 1).backward()
    if way == "before it":
        optimizer.zero_grad()
    optimizer.load_state_dict(models[0][1].state_dict())
    optimizer.zero_grad()
    assert optimizer.broken is None
    assert_same(models, "loaded")
    whole_steps(world, models)


@on_ranks(2, time_limit=60)
def test_a_load_waits_once_for_a_rank_that_never_comes(world):
    """In the rest of the step, not in the load as well."""
    if world.device.type == "cuda":
        pytest.skip("NCCL ends the process then")
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    _, optimizer = make(world, bucket_mb=TINY, transport="collective", process_group=group)
    if world.rank == 0:
        with pytest.raises(CollectiveError, match=r"agreeing on step\(\)"):
            optimizer.load_state_dict(optimizer.state_dict())


@on_ranks(1, 2, time_limit=120)
def test_a_weight_that_is_written_to_between_a_backward_pass_and_its_step(world):
    net, optimizer = make(world, "update", bucket_mb=TINY, transport="collective")
    step_of(world, [(net, optimizer)], 0)
    loss_of(net, world, 1).backward()
    with torch.no_grad():
        net.layers[3].weight.zero_()
    with pytest.raises(RuntimeError, match="was written to since the last step"):
        optimizer.step()


@on_ranks(2)
def test_written_weights_are_the_masters_that_a_state_dict_lacks(world):
    """The pass that a load ends takes them for its own."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective")
    step_of(world, [(net, optimizer)], 0)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for entries in state_dict["state"].values():
        del entries["master"]
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    optimizer.load_state_dict(state_dict)
    assert all(torch.all(master == 0.5) for master in optimizer.gathered_masters())


@on_ranks(2)
def test_options_differ_between_ranks(world):
    """As of the first update: what a scheduler changes behind it is compared in the next step."""
    net, optimizer = make(world, bucket_mb=TINY, transport="collective")
    optimizer._agreement.defers = False
    loss_of(net, world, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + world.rank)
    optimizer.step()
    optimizer.zero_grad()
    with nothing_changes(net, optimizer):
        loss_of(net, world, 1).backward()
        with pytest.raises(RuntimeError, match=r"rank 0 has .*'lr'\] 0.1.*rank 1 has .*'lr'\] 0.2"):
            optimizer.step()


# Agreements that no host waits for: so it is by itself with NCCL


def make_deferred(world, **options):
    net, optimizer = make(world, bucket_mb=TINY, transport="collective", **options)
    optimizer._agreement.defers = True
    return net, optimizer


@on_ranks(2, 3, time_limit=120)
@pytest.mark.parametrize("state", ["full", "compact"])
def test_deferred_steps_have_the_bytes_of_a_plain_step(world, state):
    plain = make(world, None, state=state, bucket_mb=TINY, transport="collective")
    whole_steps(world, [plain, make_deferred(world, state=state)])


@on_ranks(2, 3)
@pytest.mark.parametrize("what", ["nan", "option"])
def test_the_others_hear_of_a_refused_step_in_the_next_one(world, what):
    """It has changed nothing on any rank, and steps go on behind it."""
    net, optimizer = make_deferred(world)
    step_of(world, [(net, optimizer)], 0)
    alone = what == "nan" and world.rank == 1
    with nothing_changes(net, optimizer):
        if world.rank == 1:
            optimizer.param_groups[0]["lr"] = math.nan if what == "nan" else 0.5
        loss_of(net, world, 1).backward()
        with pytest.raises(ValueError, match="must be finite") if alone else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.found_inf.item() == 1
        found = "rank 1 found an error" if what == "nan" else "options of param_groups differed"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"which no rank has taken: {found}"):
                optimizer.check()
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
        if world.rank:
            loss_of(net, world, 2).backward()
        found = found if what == "nan" else r"same on every rank: rank 0 has .*'lr'\] 0.02, "
        with pytest.raises(RuntimeError, match=found):
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.broken is None
    step_of(world, [(net, optimizer)], 3)
    optimizer.check()
    check_weights(list(net.parameters()), optimizer)


@on_ranks(2, 3)
def test_the_others_hear_of_an_error_behind_the_first_update_in_the_next_step(world):
    """They do not save what they have, and all are broken then."""
    net, optimizer = make_deferred(world)
    step_of(world, [(net, optimizer)], 0)
    good = copy.deepcopy(optimizer.state_dict())
    pass_that_writes(world, net, 1)
    with of_last_rank(world, "was written to") if is_last(world) else contextlib.nullcontext():
        optimizer.step()
    assert (optimizer.broken is not None) == is_last(world)
    with pytest.raises(RuntimeError, match="must not be saved"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    optimizer.zero_grad()
    loss_of(net, world, 2).backward()
    found = rf"which all ranks have taken in part: rank {world.world_size - 1} found an error"
    with pytest.raises(RuntimeError, match=found):
        optimizer.step()
    assert optimizer.broken is not None
    optimizer.zero_grad()
    optimizer.load_state_dict(good)
    step_of(world, [(net, optimizer)], 3)
    optimizer.check()
    check_weights(list(net.parameters()), optimizer)


@on_ranks(2)
def test_groups_of_some_ranks(world):
    parameters = make_parameters(world.device)
    group = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    param_groups, options = [{"params": parameters, "process_group": group}], {"overlap": "update"}
    with pytest.raises(ValueError, match=r"overlap='update' is not supported because parameter groups"):
        ZeroFP4Optimizer(param_groups, FusedAdamW, **keywords(OPTIONS, options))
