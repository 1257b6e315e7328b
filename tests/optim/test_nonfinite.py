"""Gradients with a NaN or Inf, in one process: the step is skipped before anything changes, or raises."""

import math

import pytest
import torch
from cases.optim import (
    Plain,
    assert_all_equal,
    built,
    check,
    everything,
    make_gradients,
    set_gradients,
    turn_gradients,
)

from zerofp4.optim import FusedAdamW
from zerofp4.optim.agreement import first_nonfinite

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}
VALUES = [math.nan, math.inf, -math.inf]
# The first three are told on the device, for the others the host reads. Torch has fused ones of its own kind:
# where SGD with momentum skips its first step, its momentum buffers stay uninitialized.
INNER = {
    "FusedAdamW": (FusedAdamW, DEFAULTS),
    "fused AdamW": (torch.optim.AdamW, DEFAULTS | {"fused": True}),
    "fused SGD": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "AdamW": (torch.optim.AdamW, DEFAULTS),
    "fused SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


@pytest.mark.parametrize("first", [0, 1], ids=["a good step", "a bad step"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("turned", [False, True])
def test_a_step_is_skipped_and_the_next_one_goes_on(device, turned, name, clip, first):
    """As if the step had not been called: masters, moments and step counts are those of the steps taken."""
    optimizer_class, defaults = INNER[name]
    parameters, optimizer = built(device, optimizer_class, **defaults)
    plain, skipped = Plain(parameters, optimizer_class, **defaults), 0
    for step in range(first, 6):
        set_gradients(parameters, make_gradients(parameters, step))
        bad = step % 2 == 1
        if bad:
            i = (0, 3, 5)[step // 2]
            parameters[i].grad.view(-1)[-1] = VALUES[step // 2]
            skipped += 1
        if turned:
            turn_gradients(parameters)
        before = optimizer.gathered_masters() if step == first else everything(parameters, optimizer)
        if clip is not None:
            total = optimizer.clip_grad_norm_(1e30)  # scales by 1
            assert total.isfinite().item() == (not bad)
        assert optimizer.step(lambda: 7) == 7
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (bad, skipped)
        if bad:
            assert optimizer.first_nonfinite() == f"param_groups[0]['params'][{i}]"
            # Before the first step there may be no moments yet.
            now = optimizer.gathered_masters() if step == first else everything(parameters, optimizer)
            assert_all_equal(now, before, "tensor")
        else:
            assert optimizer.first_nonfinite() is None
            plain.step()
            check(optimizer, plain, f"step {step}:")


def test_what_was_found_is_told_until_the_next_step_looks(device):
    """Which may find another, or none; loads in between change nothing of it."""
    parameters, optimizer = built(device, FusedAdamW, **DEFAULTS)
    for step, bad in enumerate([(4, 3), (2,), ()]):
        set_gradients(parameters, make_gradients(parameters, step))
        for i in bad:
            parameters[i].grad.view(-1)[-1] = math.nan
        optimizer.step()
        optimizer.zero_grad()
        state_dict = optimizer.state_dict()
        for piece in [piece for entries in state_dict["state"].values() for piece in entries.values()]:
            piece.copy_(piece.values.clone().view(piece.shape))
        for _ in range(2):
            first = f"param_groups[0]['params'][{min(bad)}]" if bad else None
            assert optimizer.first_nonfinite() == first
            assert optimizer.skipped_steps == min(step + 1, 2)
            optimizer.load_state_dict(state_dict)


def test_a_sum_of_squares_that_overflows_is_no_reason_to_skip(device):
    parameters, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    for value in (3e38, -3e38):
        parameters[3].grad[0, 0] = value
        optimizer.step()
        assert optimizer.skipped_steps == 0


def test_what_is_infinite_in_fp32(device):
    """A gradient of another dtype than those of weights becomes FP32 before anything is done with it. An
    empty one holds nothing.
    """
    values = torch.ones(3), torch.tensor([1.0, 1e300], dtype=torch.float64), torch.ones(0).double()
    gradients = [value.to(device) for value in values]
    assert first_nonfinite(gradients, [3, 2, 1]).item() == 2
    gradients[1][1] = 1e30
    assert first_nonfinite(gradients, [3, 2, 1]).item() == 0
