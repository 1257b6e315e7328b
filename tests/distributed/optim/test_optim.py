"""ZeroFP4Optimizer over several ranks: the bytes of one machine, at any world size."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from cases.optim import (
    Plain,
    assert_all_equal,
    batch,
    check,
    keywords,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
    take_step,
    through_a_file,
)
from torch import nn

from distributed.engine.overlap_cases import SMALL, assert_same, loss_of, make, step_of
from distributed.optim.cases import (
    assert_same_on_all_ranks,
    by_default,
    check_weights,
    model_bytes,
    parameters_of,
    raise_in_turn,
)
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@on_ranks(1, 2, 3, 4)
def test_weights_are_the_quantized_masters_on_every_rank(world):
    """The ranks differ until the optimizer gives them rank 0's values; then they never differ again."""
    net = make_net(world.device, seed=world.rank)
    values = [p.detach().clone() for p in make_net(world.device).parameters()]
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
    parameters = list(net.parameters())
    check_weights(parameters, optimizer)
    assert_all_equal([p.detach().float() for p in parameters], [v.float() for v in values], "value of rank 0")
    for step in range(4):
        net(batch(world.device, 10 * step + world.rank)).square().mean().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        check_weights(parameters, optimizer)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("name", "options", "default"),
    [
        ("AdamW", {"fused": True}, torch.float32),
        ("AdamW", {}, torch.float16),
        ("SGD", {"momentum": 0.9, "nesterov": True}, torch.bfloat16),
        ("Adagrad", {}, torch.float64),
    ],
)
def test_same_gradients_same_masters_at_any_world_size(world, name, options, default):
    """Whatever torch's default dtype is."""
    options = {"lr": 0.02, "weight_decay": 0.1, **options}
    optimizer_class = getattr(torch.optim, name)
    plain = Plain(parameters_of(world), optimizer_class, **options)
    with by_default(default):
        optimizer = ZeroFP4Optimizer(plain.parameters, optimizer_class, **keywords(options))
    for step in range(5):
        set_gradients(plain.parameters, make_gradients(plain.parameters, step))
        plain.step()
        with by_default(default):
            optimizer.clip_grad_norm_(math.inf)
            optimizer.step()
        check(optimizer, plain, f"step {step}:")
        assert_same_on_all_ranks(model_bytes(plain.parameters), optimizer.process_group())


@on_ranks(2, 4)
def test_ranks_that_own_nothing(world):
    """They save and load, too, as torch.save does it for the same rank."""
    specifications = [((4, 6), torch.bfloat16, True), ((3,), torch.float32, False)]
    plain = Plain(make_parameters(world.device, 0, specifications), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = ZeroFP4Optimizer(plain.parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    owned = sum(m is not None for m in optimizer._shards.masters)
    assert owned == (2 if world.rank == 0 else 0)
    for step in range(3):
        if step == 1:
            saved = through_a_file(optimizer.state_dict())
            take_step(plain.parameters, optimizer, 9)
            optimizer.load_state_dict(saved)
        set_gradients(plain.parameters, make_gradients(plain.parameters, step))
        plain.step()
        optimizer.clip_grad_norm_(math.inf)
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


# What stays, and what goes from one optimizer to another


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("cls", [torch.optim.SGD, FusedAdamW])
def test_masters_are_handed_over_to_another_layout(world, cls):
    """Whoever owned a master before, and whatever rank 0 could see of it. Parameters that were frozen begin
    with their values.
    """
    parameters, frozen = parameters_of(world), (1, 2)
    for i in frozen:
        parameters[i].requires_grad_(False)
    old = ZeroFP4Optimizer(parameters, lr=0.1)
    gradients = make_gradients(parameters, world.rank)
    set_gradients(parameters, [None if i in frozen else gradient for i, gradient in enumerate(gradients)])
    old.step()
    masters = old.gathered_masters()
    assert not masters[0].equal(parameters[0].detach().float())  # the weight alone would not do
    for i in frozen:
        masters[i] = parameters[i].detach().float().clone()
        parameters[i].requires_grad_(True)
    order = [4, 5, 2, 7, 0, 8, 1, 6, 3]
    reordered = [parameters[i] for i in order]
    optimizer = ZeroFP4Optimizer(reordered, cls, masters_from=old, lr=0.1)
    assert_all_equal(optimizer.gathered_masters(), [masters[i] for i in order], "master")
    check_weights(reordered, optimizer)
    source = optimizer if world.rank == 0 else None
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    refused = [
        ({"masters_from": source}, r"\[0\] is .*, of masters_from on rank 0 and .* in group 0 on"),
        ({"masters_from": optimizer, "process_group": alone}, "is sharded over another process group"),
    ]
    for options, message in refused if world.world_size > 1 else ():
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(parameters, **keywords(options))
    set_gradients(reordered, make_gradients(reordered, 0))
    with pytest.raises(RuntimeError, match="another ZeroFP4Optimizer was built over these parameters"):
        old.step()
    optimizer.step()
    check_weights(reordered, optimizer)


FROZEN_DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.float64, torch.complex64)


@on_ranks(1, 2)
def test_frozen_parameters_of_any_dtype_get_rank_0s_bytes(world):
    """As the codes of QLoRA, or weights in fp8. One is not contiguous."""
    values = torch.arange(24.0, device=world.device).view(4, 6)
    expected = [(values % 7).to(dtype) for dtype in FROZEN_DTYPES]
    own = expected if world.rank == 0 else [torch.zeros_like(each) for each in expected]
    frozen = [nn.Parameter(each.clone(), requires_grad=False) for each in own]
    frozen.append(nn.Parameter(frozen[0].detach().clone().t(), requires_grad=False))
    parameters = [*frozen, *parameters_of(world)]
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1)
    for step in range(2):
        gradients = make_gradients(parameters, step)[len(frozen) :]
        set_gradients(parameters[len(frozen) :], gradients)
        optimizer.step()
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_all_equal([p.detach() for p in frozen], [*expected, expected[0].t()], "frozen parameter")
    assert optimizer.gathered_masters()[: len(frozen)] == [None] * len(frozen)


# Module.to() once the optimizer exists, as Trainer, accelerate and Lightning call it. Where it changes
# nothing, training goes on with the bytes of a run without it, though torch swaps quantized parameters.


WAYS = {
    "in step()": {},
    "backward": {"overlap": "backward"},
    "forward": {"overlap": "forward", "gradient_dtype": torch.float32},
    "both": {"overlap": "both"},
}


def move(net, world) -> None:
    """Conversions that change nothing."""
    net.to(world.device)
    net.to(world.device, non_blocking=True)
    net.layers._apply(lambda tensor: tensor)


@on_ranks(1, 2)
@pytest.mark.parametrize("way", WAYS)
def test_what_changes_nothing_is_not_seen(world, way):
    """Before the first backward pass, between two of them, and with gradients of which one is missing."""
    models = [make(world, bucket_mb=SMALL, **WAYS[way]) for _ in range(2)]
    for step in range(3):
        for (net, optimizer), moves in zip(models, (False, True), strict=True):
            for micro in range(2):
                if moves and micro != step:
                    move(net, world)
                with optimizer.no_sync() if micro == 0 else contextlib.nullcontext():
                    loss_of(net, world, 10 * step + micro, rare=micro == 0).backward()
            if moves and step != 2:
                move(net, world)
            optimizer.clip_grad_norm_(0.1)
            if moves:
                move(net, world)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}")


@on_ranks(1, 2)
def test_what_changes_something_is_found_by_the_next_step(world):
    """And taken back by refresh() where that can be."""
    models = [make(world) for _ in range(2)]
    net, optimizer = models[1]
    step_of(world, models, 0)
    found = "rank 0 found an error, and no rank takes this step"
    if world.rank == 0:
        net.layers[1].half()
        assert net.layers[1].weight.dtype == torch.float16
        found = r"layers\.1\.\w+' was .*bfloat16.* now it is .*float16.* change the model back .*refresh\(\)"
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=found):
            raise_in_turn(optimizer, call)
    if world.rank == 0:
        with pytest.raises(ValueError, match=found):
            optimizer.refresh()
        net.layers[1].bfloat16()
        optimizer.refresh()
    optimizer.zero_grad()
    step_of(world, models, 1)
    assert_same(models, "behind refresh()")
