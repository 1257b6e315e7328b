"""ZeroFP4Optimizer over several ranks: the bytes of one machine, at any world size."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from cases.optim import (
    Plain,
    assert_all_equal,
    check,
    keywords,
    make_gradients,
    make_parameters,
    set_gradients,
    take_step,
    through_a_file,
)
from torch import nn

from distributed.engine.overlap_cases import SMALL, assert_same, loss_of, make
from distributed.optim.cases import (
    check_weights,
    parameters_of,
)
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


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
