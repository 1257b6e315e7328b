"""Casts captured in CUDA graphs: what a graph uses stays, and a graph uses what it was captured with.

On the CPU a capture is pretended, to see what is held.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from cases.cast import check, check_kinds, check_replays, make
from helpers import assert_bytes_equal, needs_gpu

import zerofp4

cast = zerofp4.cast_master_weights_to_nvfp4


@pytest.fixture
def capture(monkeypatch):
    """Pretends a capture on the CPU: capture(True) to capture(False)."""

    def pretend(capturing: bool) -> None:
        for module in (zerofp4.ops, zerofp4.ops.device):
            monkeypatch.setattr(module, "is_capturing", lambda device: capturing)

    return pretend


def owned(values: torch.Tensor) -> tuple[torch.Tensor, weakref.ref]:
    """(a tensor, whether its memory is alive)"""
    owner = values.numpy().copy()
    return torch.from_numpy(owner), weakref.ref(owner)


def leave_own_amaxes(plan) -> None:
    plan.begin_update()
    plan._stages.run("begin_amax")
    plan.end_update()


# What is held


@pytest.mark.parametrize("count", [1, 2])
def test_a_plan_holds_what_was_captured(capture, count):
    weights, masters, starts = make("cpu", [(34, 288), (16, 16)][:count])
    masters[-1], alive = owned(masters[-1])
    codes, codes_alive = owned(weights[-1].rowwise_data)
    weights[-1].rowwise_data = codes
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    capture(True)
    plan.step()
    plan.post()
    capture(False)
    weights[-1].rowwise_data = codes.clone()
    masters[-1].data = masters[-1].clone()
    del codes
    plan.refresh()
    plan.step()
    assert alive() is not None and codes_alive() is not None
    check(weights, masters)
    del plan
    assert alive() is None and codes_alive() is None


@pytest.mark.parametrize("into", ["weights", "buffers"])
@pytest.mark.parametrize("parameters", [False, True])
def test_the_functions_hold_what_was_captured(capture, into, parameters):
    weights, masters, starts = make("cpu", ((16, 16), (32, 16)))
    masters[1], master_alive = owned(masters[1])
    if parameters:
        masters = [torch.nn.Parameter(master) for master in masters]
    codes, codes_alive = owned(weights[1].rowwise_data)
    weights[1].rowwise_data = codes
    found_inf, flag_alive = owned(torch.zeros(1))
    buffers, buffer_alive = None, codes_alive
    if into == "buffers":
        buffers = [torch.zeros(128, dtype=torch.uint8), None]
        buffers[1], buffer_alive = owned(torch.zeros(256, dtype=torch.uint8))
    for capturing in (False, True, False):
        capture(capturing)
        cast(weights, masters, starts, None, buffers, found_inf=found_inf)
        zerofp4.post_all_gather_processing(weights)
    weights[1].rowwise_data = codes.clone()
    shapes = [master.shape for master in masters]
    del masters, buffers, found_inf, codes
    for policy in ("skip", "raise") * 2:
        cast(weights, [torch.randn(shape) for shape in shapes], starts, on_nonfinite=policy)
        zerofp4.post_all_gather_processing(weights)
    for alive in (master_alive, codes_alive, flag_alive, buffer_alive):
        assert alive() is not None


@pytest.mark.parametrize("captured", [False, True])
def test_a_captured_plan_outlives_one_with_other_options(capture, captured):
    weights, masters, starts = make("cpu")
    cast(weights, masters, starts)
    plan = weakref.ref(next(iter(weights[0].record.attachments["cast_plans"].values())))
    capture(captured)
    cast(weights, masters, starts)
    capture(False)
    cast(weights, masters, starts, on_nonfinite="raise")
    assert (plan() is not None) == captured


def test_a_captured_step_looks_at_everything(capture):
    weights, masters, starts = make("cpu", [(2, 2)] * 600)
    plan = zerofp4.CastPlan(weights, masters, starts)
    masters[-1].data = masters[-1].clone()
    capture(True)
    with pytest.raises(RuntimeError, match=r"master_weights\[599\] has moved"):
        plan.step()


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("step", [False, True])
def test_only_an_update_and_a_step_of_one_kind_share_amaxes(capture, update, step):
    weights, masters, starts = make("cpu")
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    capture(update)
    leave_own_amaxes(plan)
    capture(step)
    old = weights[1].amax.clone()
    masters[1].mul_(0.5)
    plan.step()
    assert weights[1].amax == (old if update == step else old / 2)
    plan.step()
    check(weights, masters)


# On a GPU


@needs_gpu
@pytest.mark.parametrize("count", [1, 2])
def test_a_replay_after_refresh_uses_what_was_captured(count):
    weights, masters, starts = make("cuda", [(34, 288), (16, 16)][:count])
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.step()
        plan.post()
    captured = [master.detach() for master in masters]
    old = [weight.rowwise_data for weight in weights]
    for weight, master in zip(weights, masters, strict=True):
        master.data = master * -3
        weight.rowwise_data = weight.rowwise_data.clone()
    plan.refresh()
    plan.step()
    plan.post()
    check_kinds(weights, masters)
    codes = [weight.rowwise_data.clone() for weight in weights]
    for master in captured:
        master.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    for weight, expected, before in zip(weights, codes, old, strict=True):
        assert_bytes_equal(weight.rowwise_data, expected, "codes that were bound after the capture")
        weight.rowwise_data = before
    check_kinds(weights, captured)
    graph = torch.cuda.CUDAGraph()
    plan.refresh()
    with torch.cuda.graph(graph):
        plan.step()
    for master in masters:
        master.mul_(5)
    graph.replay()
    torch.cuda.synchronize()
    check(weights, masters)


@needs_gpu
@pytest.mark.parametrize("count", [1, 3])
def test_replays_of_functions_outlive_their_arguments(count):
    """Later calls, with other masters and other codes, and memory that is given back: none of it matters to
    the graph.
    """
    weights, masters, starts = make("cuda", [(34, 288), (16, 16), (130, 66)][:count])

    def run(masters):
        cast(weights, masters, starts)
        zerofp4.post_all_gather_processing(weights)

    run(masters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(masters)
    values = [master.clone() for master in masters]
    old = [weight.rowwise_data for weight in weights]
    del masters
    for _ in range(3):
        for weight in weights:
            weight.rowwise_data = weight.rowwise_data.clone()
        run([torch.randn_like(value) for value in values])
    poison = [torch.full((n,), torch.nan, device="cuda") for n in (64, 256, 1024, 9792, 20000) * 50]
    graph.replay()
    torch.cuda.synchronize()
    assert all(p.isnan().all() for p in poison)
    for weight, codes in zip(weights, old, strict=True):
        weight.rowwise_data = codes
    check_kinds(weights, values)


@needs_gpu
def test_a_captured_step_with_and_without_the_amaxes_of_a_captured_update():
    for update in ({}, {"update": leave_own_amaxes}):
        check_replays(*make("cuda"), **update)


@needs_gpu
def test_addresses_cannot_be_taken_in_a_capture():
    weights, masters, starts = make("cuda")
    cast(weights, masters, starts)
    moved = [master * -3 for master in masters]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(RuntimeError, match="make the same call once before the capture"),
    ):
        cast(weights, moved, starts)
    cast(weights, moved, starts)
    check(weights, moved)
