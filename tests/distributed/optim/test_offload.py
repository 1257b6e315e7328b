"""Masters and their state on the host, all of them or half: the same bytes as on the device.

Without a GPU the device is the CPU, too, and what travels is copied all the same.
"""

from __future__ import annotations

import functools
import math
import re
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients, through_a_file
from torch import nn

import zerofp4
from distributed.cases import raised_by, shared_folder
from distributed.optim import cases
from distributed.optim.cases import all_bytes, built, gradients_of
from distributed.optim.group_cases import Mesh, Mixture, Parts
from distributed.optim.test_kinds import KINDS, ROWS, make
from distributed.optim.test_reference_step import take_steps
from distributed.run import on_ranks
from distributed.state.cases import run, trained
from zerofp4.engine import Step, offload
from zerofp4.optim import AveragedMasters, FusedAdamW, ZeroFP4Optimizer, master_state_dict

SMALL = 0.003
"""bucket_mb for several buckets of NVFP4 weights, of which half are offloaded by a share of 0.5."""

WAYS = [
    ("collective", None, "full", True, 1.0),
    ("collective", "both", "compact", False, 1.0),
    ("collective", "forward", "full", False, 0.5),
    ("collective", "backward", "full", True, 0.5),
    ("reduce_scatter", None, "compact", True, 0.5),
    ("early peers", None, "full", False, 0.5),
    ("late peers", "backward", "compact", True, 1.0),
    ("late peers", "both", "full", False, 1.0),
    ("collective", "update", "full", False, 1.0),
    ("collective", "update", "compact", False, 0.5),
    ("reduce_scatter", "update", "full", False, 1.0),
    ("late peers", "update", "compact", False, 1.0),
    ("early peers", "update", "full", False, 0.5),
]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("exchange", "overlap", "state", "clips", "share"), WAYS)
def test_the_bytes_of_the_reference(world, exchange, overlap, state, clips, share):
    """With gradients that ranks lack, micro-batches and a NaN that skips a step."""
    if world.world_size > 1 or exchange == "collective":
        take_steps(world, exchange, overlap, clips, state=state, offload=share)


SUMS = {"offload": 1.0, "offload_gradients": True}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("exchange", ["collective", "reduce_scatter"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "forward", "state": "compact"},
        {"gradient_wire": torch.float16},
        {"gradient_dtype": torch.float32},
    ],
)
def test_micro_batches_that_are_added_up_on_the_host(world, exchange, clips, options):
    options = {"overlap": None} | options | SUMS
    if world.world_size > 1 or exchange == "collective":
        take_steps(world, exchange, options.pop("overlap"), clips, **options)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "dtypes",
    [
        {"gradient_wire": torch.float16},
        {"gradient_dtype": torch.float32},
        {"gradient_dtype": torch.float32, "gradient_wire": torch.bfloat16},
    ],
)
def test_gradients_of_other_dtypes(world, dtypes):
    take_steps(world, "collective", None, True, offload=1.0, **dtypes)


def homes(optimizer: ZeroFP4Optimizer) -> list[str]:
    return [bucket["masters"] for bucket in optimizer.describe()["buckets"]]


def both(world, make_one, share: float):
    """Two models with their optimizers, the second one's masters on the host; by their buckets, too."""
    pair = make_one(offload=0.0), make_one(offload=share)
    before, after = (homes(optimizer) for _, optimizer in pair)
    assert set(before) == {"device"}
    assert set(after) == ({"host"} if share == 1 else {"host", "device"})
    return pair


def take_same_steps(world, pair, steps, clips=False) -> None:
    assert_all_equal(*(all_bytes(*one) for one in pair), "as built: tensor")
    for step in steps:
        for parameters, optimizer in pair:
            set_gradients(parameters, gradients_of(world, parameters, step))
            if step == 2 and world.rank == world.world_size - 1:
                parameters[3].grad = torch.full_like(parameters[3], math.inf)
            if clips:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            assert (optimizer.found_inf.item() != 0) == (step == 2)
            optimizer.zero_grad()
        assert_all_equal(*(all_bytes(*one) for one in pair), f"step {step}: tensor")


@on_ranks(1, 2)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("clips", [False, True])
def test_the_bytes_of_the_device(world, share, state, clips):
    """On GPUs, if there are any. Of experts and parameters of every dtype, one without an element."""
    options = {"state": state, "bucket_mb": SMALL, "lr": 0.02, "weight_decay": 0.1}

    def make_one(**more):
        return built(world, FusedAdamW, **options, **more)

    take_same_steps(world, both(world, make_one, share), range(4), clips)


class Late:
    """The event of copies that are made when the host waits for them, as late as a GPU may make them."""

    def __init__(self, copies):
        self.copies = copies

    def synchronize(self):
        for target, source in self.copies:
            target.copy_(source)
        self.copies = []


def bring_down_late(offload, copies) -> Late:
    for target, _ in copies:
        target.fill_(math.nan)
    return Late([*copies, *offload._decision, *offload._factor])


@on_ranks(1, 2)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_come_down_late(world, share, clips):
    """Nobody reads them before, or writes to what they come from; and all are there when step() returns."""
    events = []

    def bring_down(offload, copies):
        events.append(bring_down_late(offload, copies))
        return events[-1]

    def make_one(**more):
        return built(world, FusedAdamW, bucket_mb=SMALL, lr=0.02, **more)

    pair = both(world, make_one, share)
    with mock.patch("zerofp4.engine.offload.Offload.bring_down", bring_down):
        take_same_steps(world, pair, range(4), clips)
    assert len(events) >= 8 and not any(event.copies for event in events)


class Going:
    """Copies from slots to the device, which a GPU may make as late as when the host waits for them: until
    then nobody may write to the slots.
    """

    def __init__(self, optimizer: ZeroFP4Optimizer):
        slots = optimizer._shards.offload._slots
        self._places = {tensor.data_ptr() for slot in slots for tensor in (slot.up, slot.amaxes)}
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.count = 0

    def check(self) -> None:
        for source, then in self._left:
            assert_all_equal([source], [then], "what is on its way up")

    def begin(self, source: torch.Tensor) -> None:
        self.check()
        if source.untyped_storage().data_ptr() in self._places:
            self._left.append((source, source.clone()))
            self.count += 1

    def end(self, event: torch.cuda.Event | None):
        """An event after all copies so far. event: the one that it takes the place of."""
        return types.SimpleNamespace(synchronize=functools.partial(self._wait, self.count, event))

    def _wait(self, count: int, event: torch.cuda.Event | None) -> None:
        self.check()
        offload.wait(event)
        del self._left[: max(0, len(self._left) - (self.count - count))]


@on_ranks(1)
def test_slots_are_kept_until_what_they_hold_has_left(world):
    """Also when only the cast of a step is run, as after a load, and no gradients are waited for."""
    parameters, optimizer = built(world, FusedAdamW, bucket_mb=SMALL, offload=1.0)
    going, copy, copy_tensor = Going(optimizer), offload.copy, torch.Tensor.copy_

    def begin(target, source, non_blocking=False):
        if non_blocking:
            going.begin(source)
        return copy_tensor(target, source, non_blocking)

    with mock.patch.object(torch.Tensor, "copy_", begin), mock.patch.object(offload, "copy") as patched:
        patched.side_effect = lambda *arguments: going.end(copy(*arguments))
        for step in range(2):
            set_gradients(parameters, make_gradients(parameters, step))
            optimizer.step()
        before = going.count
        optimizer.load_state_dict(optimizer.state_dict())
        going.check()
    assert going.count >= before + 8


@on_ranks(1, 2)
@pytest.mark.parametrize(("overlap", "options"), [("update", {"offload": 1.0}), (None, SUMS)])
def test_gradients_of_backward_passes_that_come_down_late(world, overlap, options):
    with mock.patch("zerofp4.engine.offload.Offload.bring_down", bring_down_late):
        take_steps(world, "collective", overlap, True, **options)


@on_ranks(1)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_pass_waits_for_no_gradient_of_the_present_turn(world, share):
    """The device makes those while the host updates the bucket before."""
    parameters, optimizer = built(world, FusedAdamW, bucket_mb=SMALL, overlap="update", offload=share)
    turns, waits, take_turn, copy = [0], [], Step.turn, offload.copy

    class Turn:
        def __init__(self, event):
            self.begun, self.event = turns[0], event

        def synchronize(self):
            offload.wait(self.event)  # or the host would read what has not arrived
            waits.append(turns[0] - self.begun)

    def count(*arguments):
        turns[0] += 1
        take_turn(*arguments)

    with mock.patch.object(Step, "turn", count), mock.patch.object(offload, "copy") as patched:
        patched.side_effect = lambda *arguments: Turn(copy(*arguments))
        for _ in range(2):
            loss_of(parameters).backward()
            optimizer.step()
    assert len(waits) > 8 and min(waits) == 1


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{"overlap": "update", "offload": 1.0}, SUMS])
def test_a_pass_keeps_the_gradients_of_one_bucket(world, options):
    parameters, optimizer = built(world, FusedAdamW, bucket_mb=SMALL, **options)
    most, kept = max(sum(p.nbytes for p in b.parameters) for b in optimizer._shards.buckets), []
    assert most < sum(p.nbytes for p in parameters) / 2

    def count(_):
        kept.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))

    handles = [p.register_post_accumulate_grad_hook(count) for p in parameters]
    for _ in range(1 if "overlap" in options else 3):
        sum(p.float().square().sum() for p in parameters).backward()
        assert all(p.grad is None for p in parameters)
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert 0 < max(kept) <= most


def loss_of(parameters):
    return sum(p.float().square().sum() for p in parameters)


@on_ranks(1, 2)
def test_a_pass_that_raises_while_gradients_are_added_up(world):
    """step() ends it, and raises on every rank; what was added up is lost. Then training goes on."""
    pair = [built(world, FusedAdamW, bucket_mb=SMALL, **SUMS) for _ in range(2)]
    (parameters, optimizer), (others, reference) = pair
    loss_of(parameters).backward()
    first = parameters[0]  # of the last bucket that is taken
    handle = first.register_hook(lambda _: 1 / 0)
    if world.rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss_of(parameters).backward()
    handle.remove()
    if world.rank > 0:
        loss_of(parameters).backward()
    error = raised_by(optimizer.step)
    assert ("since it raised" in str(error)) == (world.rank == 0), error
    assert isinstance(error, RuntimeError) and optimizer.broken is None
    optimizer.zero_grad()
    for own, one in ((parameters, optimizer), (others, reference)):
        for _ in range(2):
            loss_of(own).backward()
        one.step()
        before = all_bytes(own, one)
        assert one.clip_grad_norm_(1.0).item() == 0.0
        one.step()
        assert_all_equal(all_bytes(own, one), before, "after a step without gradients: tensor")
    assert_all_equal(all_bytes(parameters, optimizer), all_bytes(others, reference), "tensor")


@on_ranks(1, 2)
def test_gradients_that_are_not_added_up(world):
    parameters, optimizer = built(world, FusedAdamW, bucket_mb=SMALL, **SUMS)
    if world.world_size > 1:
        for step in range(2):
            loss_of(parameters).backward()
            if step == world.rank == 0:
                optimizer.zero_grad()
        error = raised_by(optimizer.step)
        assert re.search("has added up from 1 to 2 backward passes", str(error))
        optimizer.zero_grad()
    loss_of(parameters).backward()
    parameters[1].grad = torch.ones_like(parameters[1])
    error = raised_by(optimizer.step)
    assert isinstance(error, RuntimeError) and "was assigned after its backward pass" in str(error)
    optimizer.zero_grad()
    loss_of(parameters).backward()
    optimizer.clip_grad_norm_(0.1)
    loss_of(parameters).backward()
    error = raised_by(lambda: optimizer.clip_grad_norm_(0.1))
    assert "gradients were added to clipped ones" in str(error)
    error = raised_by(optimizer.step)
    assert "gradients changed after clip_grad_norm_" in str(error)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler(world.device.type)
    scaler.scale(loss_of(parameters)).backward()
    error = raised_by(lambda: scaler.step(optimizer))
    assert "offload_gradients adds them up while they are scaled" in str(error)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(("share", "options"), [(1.0, {}), (0.5, {"overlap": "forward", "state": "compact"})])
def test_scales_that_travel(world, share, options):
    def make_one(**more):
        return make(world, **{"bucket_mb": SMALL} | options | more)

    take_same_steps(world, both(world, make_one, share), range(3))


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [*KINDS[1:], ROWS])
def test_masters_that_are_not_finite(world, kind):
    """Their amax group keeps codes and scales, found_inf is set, and others are cast."""

    def make_one(**more):
        generator = torch.Generator().manual_seed(2)
        values = [torch.randn(48, 64, generator=generator).to(world.device) for _ in range(4)]
        parameters = [nn.Parameter(zerofp4.quantize(value, **kind)) for value in values]
        options = keywords(more, lr=0.02, amax_groups=[parameters[::2]])
        return parameters, ZeroFP4Optimizer(parameters, FusedAdamW, **options)

    pair = both(world, make_one, 1.0)
    take_same_steps(world, pair, range(1))
    for _, optimizer in pair:
        master = optimizer._shards.masters[2]
        if master is not None:
            master[-1] = math.inf
    for step in (1, 4):
        for parameters, optimizer in pair:
            set_gradients(parameters, make_gradients(parameters, step))
            optimizer.step()
            assert optimizer.found_inf.item() == 1
        assert_all_equal(*(cases.model_bytes(parameters) for parameters, _ in pair), f"step {step}: buffer")


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["experts", "parts", "mesh"])
def test_several_process_groups(world, name):
    """Of experts, of slices of tensor parallelism, and of replicas, whose means are averaged once more."""
    kind = {"experts": Mixture, "parts": Parts, "mesh": functools.partial(Mesh, shape=(2, 2))}[name]
    if world.world_size == 2 and name == "mesh":
        return
    models, optimizers = [kind(world) for _ in range(2)], []
    for model, share in zip(models, (0.0, 1.0), strict=True):
        options = {"lr": 0.02, "offload": share}
        optimizers.append(ZeroFP4Optimizer(model.param_groups(), FusedAdamW, **options))
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.set_gradients(step)
            if step != 1:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        assert_all_equal(*(cases.model_bytes(m.parameters) for m in models), f"step {step}: buffer")


@on_ranks(2)
def test_clipped_means_of_ranks_that_share_no_parameter(world):
    """They are FP32, and larger than the gradients that other steps bring down."""
    group = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    optimizers, models = [], []
    for share in (0.0, 1.0):
        models.append([nn.Parameter(torch.ones(64, 48, dtype=torch.bfloat16, device=world.device))])
        groups = [{"params": models[-1], "process_group": group}]
        optimizers.append(ZeroFP4Optimizer(groups, FusedAdamW, lr=0.02, offload=share))
    for step in range(3):
        for parameters, optimizer in zip(models, optimizers, strict=True):
            set_gradients(parameters, make_gradients(parameters, 10 * world.rank + step))
            if step != 1:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        assert_all_equal(*map(cases.model_bytes, models), f"step {step}: buffer")


@on_ranks(2)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_clipped_means_wait_on_the_host(world, share):
    optimizer = built(world, FusedAdamW, bucket_mb=SMALL, offload=share, seed=0)[1]
    before = optimizer.describe()["host_bytes"]
    optimizer.clip_grad_norm_(0.5)
    offloaded = [bucket for bucket in optimizer._shards.buckets if bucket.is_offloaded]
    means = [bucket.gradients for bucket in offloaded]
    assert {each.device.type for each in means} == {"cpu"}
    assert optimizer.describe()["host_bytes"] == before + sum(each.nbytes for each in means)


@on_ranks(3, time_limit=120.0)
@pytest.mark.parametrize("case", ["fused", "compact", "tiles, four over six"])
def test_a_run_goes_on_with_another_share_in_another_world(world, case):
    """Saved with all masters on the host; loaded with half, none, or all of them there."""
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    straight = trained(world, 5, case)
    expected = bytes_of(*straight)
    path = shared_folder(world)
    if world.rank < 2:
        model, optimizer = trained(world, 3, case, group=groups[2], offload=1.0, bucket_mb=SMALL)
        for entries in optimizer.state_dict()["state"].values():
            assert {piece.device.type for piece in entries.values() if piece.values.numel()} <= {"cpu"}
        entries = optimizer._saved.template(0).values()  # also before a first step, when a load makes memory
        assert {entry.device for entry in entries} == {torch.device("cpu")}
        dcp.save({"optimizer": optimizer}, checkpoint_id=path, process_group=groups[2])
    dist.barrier()
    for size, share in ((3, 0.5), (1, 1.0), (2, 0.0)):
        if world.rank < size:
            options = {"group": groups[size], "offload": share, "bucket_mb": SMALL}
            model, resumed = trained(world, 0, case, seed=7, **options)
            dcp.load({"optimizer": resumed}, checkpoint_id=path, process_group=groups[size])
            run(model, resumed, range(3, 5))
            found = bytes_of(model, resumed)
            assert_all_equal(found, expected, f"{size} ranks, offload={share}: tensor")
        dist.barrier()


def bytes_of(model, optimizer) -> list[torch.Tensor]:
    """all_bytes() of what is trained."""
    return all_bytes([p for p in model.parameters() if p.requires_grad], optimizer)


@on_ranks(1, 2)
def test_other_ways_to_hand_masters_on(world):
    """masters_from, a file of one rank, a state_dict(), averages, exports, and a refresh() in between."""
    model, optimizer = trained(world, 2, "compact", offload=1.0)
    plain, on_device = trained(world, 2, "compact")
    averages = [AveragedMasters(one, 0.5) for one in (optimizer, on_device)]
    run(model, optimizer, range(2, 4))
    run(plain, on_device, range(2, 4))
    optimizer.refresh()
    for average in averages:
        average.update()
    exports = [dict(master_state_dict(one, of)) for one, of in ((model, averages[0]), (plain, averages[1]))]
    assert_all_equal(list(exports[0].values()), list(exports[1].values()), "average")
    optimizer.check()
    options = {"state": "compact", "lr": 0.01, "weight_decay": 0.1}
    taken = ZeroFP4Optimizer(
        plain.named_parameters(), FusedAdamW, masters_from=on_device, offload=0.5, **options
    )
    taken.load_state_dict(
        on_device.state_dict() if world.world_size > 1 else through_a_file(on_device.state_dict())
    )
    run(model, optimizer, range(4, 6))
    run(plain, taken, range(4, 6))
    assert_all_equal(bytes_of(model, optimizer), bytes_of(plain, taken), "tensor")
    optimizer.check()


@on_ranks(2)
def test_an_error_in_the_update_of_one_rank(world):
    """All ranks go on to the end of the step, and refuse the next one until they have loaded a state."""
    parameters, optimizer = built(world, FusedAdamW, bucket_mb=SMALL, offload=1.0, seed=0)
    fused = optimizer.inner
    update, count = fused.update_bucket, [0]

    def fail(*arguments):
        count[0] += 1
        if count[0] == 2 and world.rank == 1:
            raise MemoryError("no room")
        update(*arguments)

    fused.update_bucket = fail
    error = raised_by(optimizer.step)
    if world.rank == 1:
        assert isinstance(error, MemoryError) and optimizer.broken is not None
    del fused.update_bucket
    state = built(world, FusedAdamW, bucket_mb=SMALL)[1].state_dict()
    assert raised_by(optimizer.step) is not None
    optimizer.load_state_dict(state)
    set_gradients(parameters, make_gradients(parameters, 1))
    optimizer.step()
    optimizer.check()


@on_ranks(1)
def test_a_capture_is_refused(world):
    _, optimizer = built(world, FusedAdamW, offload=1.0, seed=0)
    with mock.patch("zerofp4.optim.zero.is_capturing", return_value=True):
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph: with offload"):
                call()
    optimizer.step()
