"""A step in halves: amaxes, a reduction that is begun, and what is done with its outcome."""

from __future__ import annotations

import pytest
import torch
from cases.cast import check, leave_amaxes, make
from helpers import assert_bytes_equal

import zerofp4


def test_halves_of_two_plans_beside_each_other(device):
    """The bytes of whole steps, also where an update has left the amaxes."""
    made = [make(device) for _ in range(2)]
    plans = [zerofp4.CastPlan(*arguments) for arguments in made]
    for step in range(3):
        for _, masters, _ in made:
            for master in masters:
                master.add_(torch.randn_like(master))
        for plan in plans:
            if step != 1:
                leave_amaxes(plan, plan.master_pieces())
        for plan in plans:
            assert plan.start_step() is None
        for plan in plans:
            plan.finish_step()
            plan.post()
        for weights, masters, _ in made:
            check(weights, masters)


@pytest.mark.parametrize(
    ("position", "row"), [*((i, 0) for i in range(5)), (0, 16), (0, 34), (1, 16), (1, 64), (2, 16), (3, 33)]
)
def test_codes_in_two_parts(device, position, row):
    """Those of the weights before a position are there halfway, and of its rows before one, also of weights
    that have no owned elements, a stack and one that a thread block takes together with its neighbours.
    """
    stack = zerofp4.empty((3, 32, 48), dtype=torch.float32, device=device)
    weights, masters, starts = make(device, ((34, 288), (16, 16), (48, 512)))
    masters[1], starts[1] = None, None
    values = torch.randn(stack.numel(), device=device)
    weights, masters, starts = (
        [kept[0], new, *kept[1:]] for kept, new in ((weights, stack), (masters, values), (starts, 0))
    )
    plan = zerofp4.CastPlan(weights, masters, starts)
    found = []
    plan.start_step()
    plan.finish_step((position, row, lambda: found.extend(w.rowwise_data.clone() for w in weights)))
    plan.post()
    owned = [0, 1, 3]
    for i in owned:
        expected = zerofp4.quantize(masters[i].view(weights[i].shape).to(weights[i].dtype))
        assert_bytes_equal(weights[i].rowwise_data, expected.rowwise_data, f"codes {i}")
        rows = expected.rowwise_data.shape[-2] * (3 if i == 1 else 1) if i < position else row
        if i <= position:
            whole, half = (codes.flatten(0, -2)[:rows] for codes in (expected.rowwise_data, found[i]))
            assert_bytes_equal(half, whole, f"codes {i} halfway")
    assert len(found) == 4


def test_a_half_of_a_rank_that_cannot_take_part(device):
    """Nothing is read or written, and there is nothing to finish; after refresh() all is well."""
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    before = [weight.rowwise_data.clone() for weight in weights]
    weights[0].rowwise_data = weights[0].rowwise_data.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has moved"):
            plan.start_step()
    assert all(torch.equal(weight.rowwise_data, codes) for weight, codes in zip(weights, before, strict=True))
    plan.refresh()
    plan.start_step()
    plan.finish_step()
    plan.post()
    check(weights, masters)


class Travelling:
    """Stands for a reduction that is under way, and remembers what there was when it was waited for."""

    def __init__(self, plan):
        self.plan, self.seen = plan, []

    def wait(self):
        self.seen.append(self.plan.reduced.clone())


@pytest.mark.parametrize("what", ["begin_update", "start_step", "abstain"])
def test_a_reduction_that_nobody_finished_is_waited_for_first(device, what):
    """Before anything is written where it may still arrive: a step was left between its halves."""
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.reduced.fill_(7)
    before = plan.reduced.clone()
    plan._travelling = travelling = Travelling(plan)
    getattr(plan, what)()
    assert len(travelling.seen) == 1 and torch.equal(travelling.seen[0], before)
    assert plan._travelling is None and not torch.equal(plan.reduced, before)
    plan.begin_update()
    plan.step()
    plan.post()
    check(weights, masters)
