"""Masters in bfloat16, and amaxes that an optimizer leaves for the next step."""

from __future__ import annotations

import pytest
import torch
from cases.cast import check, leave_amaxes, make
from helpers import assert_bytes_equal

import zerofp4

cast = zerofp4.cast_master_weights_to_nvfp4


# Masters in bfloat16


def test_a_master_that_becomes_bfloat16_at_the_same_address(device):
    weights, masters, starts = make(device)
    cast(weights, masters, starts)
    halves = [master.view(torch.bfloat16)[: master.numel()] for master in masters]
    for half in halves:
        half.copy_(torch.randn(half.shape))
    cast(weights, halves, starts)
    check(weights, halves)


# Amaxes that an update leaves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_uses_the_amaxes_that_were_left_and_only_that_step(device, dtype):
    weights, masters, starts = make(device, ((34, 288), (16, 16), (130, 66)), dtype)
    groups = [[weights[0], weights[2]]]
    plan = zerofp4.CastPlan(weights, masters, starts, amax_groups=groups)
    pieces = plan.master_pieces()
    assert [p.master.data_ptr() for p in pieces] == [master.data_ptr() for master in masters]
    assert pieces[0].amax_offset == pieces[2].amax_offset
    for _ in range(2):
        leave_amaxes(plan, pieces)
        plan.step()
        left = [[b.clone() for _, b in weight.record.buffers()] for weight in weights]
        plan.step()
        for weight, buffers in zip(weights, left, strict=True):
            for (name, buffer), before in zip(weight.record.buffers(), buffers, strict=True):
                assert_bytes_equal(buffer, before, name)
        masters[0].mul_(1.5)
    # Masters that change after end_update() show that they were not looked at.
    leave_amaxes(plan, pieces)
    old = masters[1].to(dtype).float().abs().max()
    masters[1].mul_(0.5)
    plan.step()
    assert weights[1].amax == old
    plan.step()
    assert weights[1].amax == old / 2
    check(weights[1:2], masters[1:2])


def test_the_last_update_holds(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    leave_amaxes(plan, plan.master_pieces())
    masters[0].mul_(-3)
    leave_amaxes(plan, plan.master_pieces())
    plan.end_update()
    plan.step()
    check(weights, masters)


def test_amaxes_are_taken_back(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    for take_back in (plan.begin_update, plan.refresh):
        leave_amaxes(plan, plan.master_pieces())
        masters[0].mul_(-3)
        take_back()
        plan.step()
        check(weights, masters)
    with pytest.raises(RuntimeError, match=r"end_update\(\) without begin_update\(\)"):
        plan.end_update()
    plan.begin_update()
    plan.step()
    with pytest.raises(RuntimeError, match=r"end_update\(\) without begin_update\(\)"):
        plan.end_update()


def test_a_step_that_cannot_take_part_takes_amaxes_back(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    leave_amaxes(plan, plan.master_pieces())
    masters[1].data = masters[1] * -3
    for call in (plan.check, plan.step):  # on a GPU check() is the first to see a .data
        with pytest.raises(RuntimeError, match=r"master_weights\[1\] has moved"):
            call()
    assert plan.reduced[0].item() == torch.inf
    plan.refresh()
    plan.step()
    check(weights, masters)


def test_a_plan_that_abstains_forgets_the_amaxes(device):
    """They were cleared to write the flag into the vector: the next step computes them."""
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    leave_amaxes(plan, plan.master_pieces())
    plan.abstain()
    plan.step()
    plan.check()
    check(weights, masters)


def test_nonfinite_amaxes_that_were_left(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    masters[1][7] = torch.nan
    before = weights[1].rowwise_data.clone()
    leave_amaxes(plan, plan.master_pieces())
    plan.step()
    assert plan.found_inf.item() == 1
    assert_bytes_equal(weights[1].rowwise_data, before, "codes of the weight with the NaN")
    check(weights[:1], masters[:1])


def test_a_plan_of_a_rank_that_owns_nothing_has_no_pieces():
    weights, _, _ = make("cpu")
    assert zerofp4.CastPlan(weights, [None, None], [None, None]).master_pieces() == []
