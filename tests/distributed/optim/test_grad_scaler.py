"""torch's GradScaler around steps of ZeroFP4Optimizer."""

from __future__ import annotations

import pytest
import torch
from cases.optim import assert_all_equal, keywords
from torch import nn

from distributed.cases import is_last
from distributed.optim.cases import assert_same_on_all_ranks, model_bytes, raise_in_turn
from distributed.run import on_ranks
from zerofp4 import convert_model
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

SCALE = 2.0**10


def build(world, cls=FusedAdamW, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    if world.device.type == "cuda" and dtype == torch.bfloat16:  # torch looks for no Inf in those on a GPU
        options["gradient_dtype"] = torch.float32
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16)).to(world.device, dtype)
    convert_model(model)
    return model, ZeroFP4Optimizer(model.parameters(), cls, lr=0.02, **keywords(options))


def scaler_of(world) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(world.device.type, init_scale=SCALE)


def loss_of(world, model, index: int) -> torch.Tensor:
    """Infinite on the last rank for batch 1."""
    generator = torch.Generator().manual_seed(100 * world.rank + index)
    batch = torch.randn(8, 32, generator=generator).to(world.device, next(model.parameters()).dtype)
    loss = model(batch).float().square().mean()
    return loss * torch.inf if index == 1 and is_last(world) else loss


@on_ranks(1, 2)
def test_the_scale_of_other_ranks_stays_after_an_inf_of_one(world):
    """Each unscales its own gradients, and all skip the step. (test_step_programs compares bytes.)"""
    model, optimizer = build(world, torch.optim.AdamW)
    scaler = scaler_of(world)
    for index in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(world, model, index)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.found_inf.item() == (index == 1)
        assert_same_on_all_ranks(model_bytes(model.parameters()))
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == (SCALE / 2 if is_last(world) else SCALE)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "clip", "message"),
    [
        ({"overlap": "backward"}, False, "sends them while they are scaled"),
        ({}, True, r"call scaler.unscale_\(optimizer\) before it"),
        ({"dtype": torch.float16}, False, "gradient_dtype=torch.float32"),
    ],
)
def test_gradients_that_cannot_be_unscaled_are_refused(world, options, clip, message):
    if world.world_size == 1 and "overlap" in options:
        return  # which sends nothing
    model, optimizer = build(world, **options)
    scaler = scaler_of(world)
    scaler.scale(loss_of(world, model, 0)).backward()
    if clip:
        optimizer.clip_grad_norm_(1.0)
    found = f"by the scale of GradScaler: .*{message}"
    with pytest.raises(RuntimeError, match=found):
        raise_in_turn(optimizer, lambda: scaler.step(optimizer))
    assert optimizer.grad_scale == 1  # GradScaler multiplies its next scale by it
    optimizer.zero_grad()
    loss_of(world, model, 0).backward()
    optimizer.step()
    assert optimizer.found_inf.item() == 0


@on_ranks(1, 2)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("fault", ["moved", "option"])
def test_a_refused_step_that_is_taken_again_divides_gradients_once(world, fault, alone):
    """Whether the error came before they were divided, would have come after that, or is another rank's. Only
    a rank that waits for the vote can take the step again.
    """
    (model, optimizer), (plain, expected) = (build(world, on_nonfinite="raise") for _ in range(2))
    scaler, group = scaler_of(world), optimizer.param_groups[0]
    scaler.scale(loss_of(world, model, 0)).backward()
    is_at_fault = is_last(world) or not alone
    if is_at_fault and fault == "moved":
        bias = optimizer.param_groups[0]["params"][1]
        bias.data = bias.data.clone()
    elif is_at_fault:
        group["lr"] = torch.nan
    message = ("moved" if fault == "moved" else "lr") if is_at_fault else "rank . found an error"
    with pytest.raises((RuntimeError, ValueError), match=message):
        raise_in_turn(optimizer, lambda: scaler.step(optimizer))
    optimizer.refresh()
    group["lr"] = 0.02
    scaler.step(optimizer)
    loss_of(world, plain, 0).backward()
    expected.step()
    gradients = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    assert_all_equal(*map(list, zip(*gradients, strict=True)), "gradient")
    assert_all_equal(optimizer.gathered_masters(), expected.gathered_masters(), "master")


SENDING = [{"overlap": "backward"}, {"overlap": "backward", "gradient_wire": torch.float32}]
"""With which p.grad is in the memory that it is sent from, and is copied there."""


@on_ranks(2)
@pytest.mark.parametrize("options", SENDING)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("calls", ["step", "clip", "clip before unscale"])
def test_gradients_that_were_sent_before_unscale_are_refused(world, options, alone, calls):
    """By every rank, also where one alone has a scaler, and nothing has changed. The next call sends what
    unscale_() has made of them; what was clipped before is refused until zero_grad().
    """
    (model, optimizer), (plain, expected) = build(world, bucket_mb=1e-4, **options), build(world)
    is_scaled = is_last(world) or not alone
    scaler = torch.amp.GradScaler(world.device.type, init_scale=SCALE, enabled=is_scaled)
    scaler.scale(loss_of(world, model, 0)).backward()
    loss_of(world, plain, 0).backward()
    if calls == "clip before unscale":
        optimizer.clip_grad_norm_(0.1)
    scaler.unscale_(optimizer)
    before = optimizer.gathered_masters()
    for _ in range(2 if calls == "clip before unscale" else 1):
        with pytest.raises(RuntimeError, match="unscale_" if is_scaled else "rank . found an error"):
            optimizer.clip_grad_norm_(0.1) if calls == "clip" else scaler.step(optimizer)
    assert_all_equal(optimizer.gathered_masters(), before, "master")
    if calls == "clip before unscale":
        optimizer.zero_grad()
        loss_of(world, model, 0).backward()
        optimizer.step()
    else:
        if calls == "clip":
            assert optimizer.clip_grad_norm_(0.1).item() == expected.clip_grad_norm_(0.1).item()
        scaler.step(optimizer)
    expected.step()
    assert_all_equal(optimizer.gathered_masters(), expected.gathered_masters(), "master")


@on_ranks(2)
@pytest.mark.parametrize("options", SENDING)
def test_gradients_that_were_not_sent_may_be_unscaled(world, options):
    """As passes under no_sync() leave them. And an Inf in what was sent is no change of it."""
    model, optimizer = build(world, **options)
    plain, expected = build(world)
    scaler = scaler_of(world)
    for index in range(2):
        with optimizer.no_sync():
            scaler.scale(loss_of(world, model, index)).backward()
        scaler.unscale_(optimizer)
        norm = optimizer.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss_of(world, plain, index).backward()
        assert_all_equal([norm], [expected.clip_grad_norm_(0.1)], "norm")
        expected.step()
        expected.zero_grad()
    loss_of(world, model, 1).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 2
    assert_all_equal(optimizer.gathered_masters(), expected.gathered_masters(), "master")
