"""overlap="update" of one rank alone: backward passes update each weight as soon as its gradient is there."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from cases.optim import (
    assert_all_equal,
    built,
    keywords,
    make_gradients,
    make_parameters,
    set_gradients,
    through_a_file,
    turn_gradients,
)
from distributed.engine.overlap_cases import (
    OPTIONS,
    TINY,
    assert_same,
    loss_of,
    make_pair,
    nothing_changes,
    step_of,
)
from distributed.engine.overlap_cases import make_updating as make
from helpers import needs_gpu
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import zerofp4
from zerofp4.optim import AveragedMasters, Communication, FusedAdamW, ZeroFP4Optimizer
from zerofp4.testing import verify_model, verify_weights


@pytest.fixture
def world(device):
    return SimpleNamespace(device=device, rank=0, world_size=1)


def test_gradients_that_somebody_assigned(device):
    """All of a step in step(), fp16 parameters and experts too, in any order of memory."""
    ways = (OPTIONS | {"overlap": overlap, "bucket_mb": TINY} for overlap in (None, "update"))
    models = [built(device, FusedAdamW, **options) for options in ways]
    for step in range(3):
        for parameters, optimizer in models:
            gradients = make_gradients(parameters, step)
            gradients[step] = None
            set_gradients(parameters, gradients)
            turn_gradients(parameters[step::2])
            optimizer.step()
            optimizer.zero_grad()
        assert_all_equal(models[1][1].gathered_masters(), models[0][1].gathered_masters(), f"step {step}")


@pytest.mark.heavy
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(world, whole):
    """Layers, or the model, whose gradients one node makes."""
    models = make_pair(world, bucket_mb=TINY)
    for net, _ in models:
        for module in [net] if whole else net.layers:
            module.compile(backend="aot_eager")
    for step in range(2):
        step_of(world, models, step)
    assert_same(models, "the end")


def test_members_of_an_amax_group_are_updated_together(world):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(4)))
    zerofp4.convert_model(net.to(world.device), columnwise=True)
    groups = [[net[0].weight, net[3].weight]]
    options = keywords(OPTIONS, amax_groups=groups, bucket_mb=TINY, overlap="update")
    optimizer = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **options)
    assert sorted(b["parameters"] for b in optimizer.describe()["buckets"]) == [1, 1, 2]
    for _ in range(2):
        net(torch.ones(8, 64, dtype=torch.bfloat16, device=world.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        verify_weights(dict(net.named_parameters()), optimizer.gathered_masters(), amax_groups=groups)


def test_options_are_those_of_the_first_update(world):
    """A scheduler that steps before the optimizer changes the next step."""
    models = make_pair(world, bucket_mb=TINY)
    for step in range(3):
        for net, optimizer in models:
            loss_of(net, world, step, rare=step != 1).backward()
            early = optimizer.describe()["overlap"] == "update"
            if not early:
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 2)
            if early:
                optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == 0.02 / (step + 2)
        assert_same(models, f"step {step}")


def test_weights_that_were_written_after_a_checkpoint_was_loaded(world):
    """They yield to the masters in the first step that is taken, which one that was refused is not."""
    net, optimizer = make(world, bucket_mb=TINY)
    step_of(world, [(net, optimizer)], 0)
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    with torch.no_grad():
        net.rare.weight.zero_()
        net.embedding.weight.add_(1)
    optimizer.param_groups[0]["lr"] = math.nan
    loss_of(net, world, 1).backward()
    with pytest.raises(ValueError, match="must be finite"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = OPTIONS["lr"]
    step_of(world, [(net, optimizer)], 3)
    verify_model(net, optimizer)


# Memory


def test_the_memory_of_a_gradient_is_freed(world):
    """By the time the next but one is made, whatever refers to it: of 13 gradients one or two live."""
    net, optimizer = make(world, bucket_mb=TINY)
    made, alive = [], []

    def note(gradient):
        made.append(StorageWeakRef(gradient.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in made))

    for p in net.parameters():
        p.register_hook(note)
    loss_of(net, world, 0).backward()
    assert len(made) == 13 and max(alive) <= 3  # weight, bias, and what made them
    optimizer.step()


@needs_gpu
def test_a_backward_pass_on_another_stream():
    """The weights are there for what is queued behind step(), on its stream."""
    world = SimpleNamespace(device=torch.device("cuda"), rank=0)
    models, side = make_pair(world, bucket_mb=TINY), torch.cuda.Stream()
    for step in range(3):
        for net, optimizer in models:
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(10_000_000)
                loss_of(net, world, step).backward()
            torch.cuda.default_stream().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


# What it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_class": torch.optim.AdamW}, "needs FusedAdamW, .* not AdamW"),
        ({"whole_matrices": True}, "needs FusedAdamW, .* not whole matrices"),
        ({"on_nonfinite": "raise"}, "other weights are updated by then"),
    ],
)
def test_what_an_optimizer_cannot_be_built_with(options, message):
    parameters = make_parameters(torch.device("cpu"), specifications=[((16, 64), torch.bfloat16, True)])
    options = {"optimizer_class": FusedAdamW, "lr": 0.1} | options
    with pytest.raises(ValueError, match=message):
        ZeroFP4Optimizer(parameters, communication=Communication(overlap="update"), **options)


def again(net, optimizer, world, zeroes=False):
    if zeroes:  # which takes no update back
        optimizer.zero_grad()
    loss_of(net, world, 1).backward()


def assigned(net, optimizer, world):
    net.norm.weight.grad = torch.ones_like(net.norm.weight)
    optimizer.step()


def scaled(net, optimizer, world):
    optimizer.grad_scale = torch.full((), 2.0, device=world.device)  # as GradScaler.step() does
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (again, "got a second gradient before step"),
        (functools.partial(again, zeroes=True), "got a second gradient before step"),
        (assigned, r"norm.weight.* was assigned after its update"),
        (scaled, "a GradScaler has scaled the loss"),
    ],
)
def test_what_comes_after_an_update_breaks_the_optimizer(world, call, message):
    """Which gradients are in the masters is not known."""
    net, optimizer = make(world, bucket_mb=TINY)
    loss_of(net, world, 0).backward()
    with pytest.raises(RuntimeError, match=message):
        call(net, optimizer, world)
    assert optimizer.broken is not None
    with pytest.raises(RuntimeError, match="of no more use"):
        optimizer.step()


def test_a_weight_that_two_reentrant_segments_use(world):
    net, optimizer = make(world, bucket_mb=TINY)
    with pytest.raises(RuntimeError, match="use_reentrant=False where several segments use one weight"):
        loss_of(net, world, 0, reentrant=True).backward()
    assert optimizer.broken is not None


def test_a_second_backward_pass_before_any_update(world):
    """It changes nothing, and zero_grad() drops both."""
    net, optimizer = make(world)  # `rare` is in the one bucket of NVFP4 weights
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=world.device)
    for _ in range(2):
        F.linear(x, net.layers[0].weight).sum().backward()
        with nothing_changes(net, optimizer), pytest.raises(RuntimeError, match="got a second gradient"):
            F.linear(x, net.layers[0].weight).sum().backward()
        assert optimizer.broken is None
        optimizer.zero_grad()
    step_of(world, [(net, optimizer)], 0)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_node_that_reads_an_updated_weight_fails(world, quantized):
    """It saved the weight for the gradient of its input alone, and would run behind the update."""
    net, _ = make(world, bucket_mb=TINY)
    weight = net.layers[0].weight if quantized else net.embedding.weight
    x = torch.ones(8, 64, dtype=torch.bfloat16, device=world.device, requires_grad=True)
    hidden = F.linear(x, weight.detach())[:, :1].expand(8, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.linear(hidden, weight).sum().backward()


def test_a_found_inf_of_ones_own(world):
    net, optimizer = make(world, bucket_mb=TINY)
    optimizer.inner.found_inf = torch.zeros((), device=world.device)
    with nothing_changes(net, optimizer), pytest.raises(RuntimeError, match=r"found_inf .* is not supported"):
        loss_of(net, world, 0).backward()
        optimizer.step()
    optimizer.inner.found_inf = None
    optimizer.zero_grad()
    step_of(world, [(net, optimizer)], 0)


# Checkpoints and errors


def test_between_a_backward_pass_and_its_step(world):
    """Nothing is clipped, accumulated, saved or handed over."""
    net, optimizer = make(world, bucket_mb=TINY)
    averages, unsaved = AveragedMasters(optimizer), r"call step\(\) before they are saved"
    taken = keywords(OPTIONS, masters_from=optimizer)
    loss_of(net, world, 1).backward()
    for call, message in (
        (lambda: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_ needs all gradients"),
        (lambda: optimizer.no_sync().__enter__(), "accumulates gradients"),
        (lambda: through_a_file(optimizer.state_dict()), unsaved),
        (lambda: zerofp4.master_state_dict(net, optimizer), unsaved),
        (optimizer.consolidate_state_dict, unsaved),
        (averages.update, unsaved),
        (lambda: ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **taken), "in the middle of a step"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            call()
    optimizer.step()
    assert optimizer.broken is None
    through_a_file(optimizer.state_dict())


def test_hooks_end_with_the_optimizer(world):
    net, optimizer = make(world, bucket_mb=TINY)
    new = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, masters_from=optimizer, **keywords(OPTIONS))
    with nothing_changes(net, new):
        loss_of(net, world, 0).backward()
    assert all(p.grad is not None for p in net.parameters())
    new.step()
