"""What a plan does on the host: noticing moved storage, autograd versions, no allocation and no waiting."""

from __future__ import annotations

import re

import pytest
import torch
from cases.cast import check, make
from helpers import assert_bytes_equal, needs_gpu, nothing_waits

import zerofp4
from zerofp4 import reference

cast = zerofp4.cast_master_weights_to_nvfp4


# Storage that moves


@pytest.mark.parametrize("place", [0, 299, 599])
def test_a_moved_master_of_many_is_noticed(place):
    weights, masters, starts = make("cpu", [(2, 2)] * 600)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    masters[place].data = torch.zeros(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"master_weights\[{place}\] has moved"):
            plan.step()
    plan.refresh()
    plan.step()
    check(weights, masters)


@pytest.mark.parametrize("call", ["check", "post"])
def test_every_other_call_looks_at_all_masters(device, call):
    weights, masters, starts = make(device, [(2, 2)] * 300)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    for place in (-1, 0):
        masters[place].data = masters[place].clone()
        with pytest.raises(RuntimeError, match=rf"master_weights\[{place % len(masters)}\] has moved"):
            getattr(plan, call)()
        with pytest.raises(RuntimeError, match=rf"master_weights\[{place % len(masters)}\] has moved"):
            plan.step()  # what was found once is not forgotten, on a GPU either
        plan.refresh()
        getattr(plan, call)()


def test_a_gather_looks_as_far_as_a_step(device):
    weights, masters, starts = make(device, [(2, 2)] * 300)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    for call in (plan.all_gather, plan.step):
        plan.all_gather()
        masters[-1].data = masters[-1].clone()
        if device.type == "cuda":
            call()
            with pytest.raises(RuntimeError, match=r"master_weights\[299\] has moved"):
                plan.post()
        with pytest.raises(RuntimeError, match=r"master_weights\[299\] has moved"):
            call()
        plan.refresh()


@pytest.mark.parametrize("how", ["share_memory_", "resize_"])
def test_codes_that_torch_moves_in_place_are_noticed_before_they_are_written(how):
    """On the CPU: their old memory belongs to somebody else by then."""
    weights = [zerofp4.empty((32, 64), scale_layouts=("compact", "swizzled")) for _ in range(3)]
    masters, starts = [torch.randn(2048) for _ in weights], [0, 0, 0]
    plan = zerofp4.CastPlan(weights, masters, starts)
    cast(weights, masters, starts)
    plan.step()
    buffer = weights[1].rowwise_data
    if how == "resize_":
        buffer.untyped_storage().resize_(0)
    else:
        buffer.share_memory_()
    for call in (plan.step, plan.post, plan.check):
        with pytest.raises(RuntimeError, match=r"model_weights\[1\]: rowwise_data has moved"):
            call()
    if how == "share_memory_":
        plan.refresh()
        plan.step()
        plan.post()
        check(weights, masters)
        cast(weights, masters, starts)  # the function takes new addresses by itself


@pytest.mark.parametrize("what", ["master_weights[0]", "found_inf"])
def test_masters_and_flags_that_torch_moves_in_place_are_noticed(what):
    weights, masters, starts = make("cpu")
    found_inf = torch.zeros(1)
    plan = zerofp4.CastPlan(weights, masters, starts, found_inf=found_inf)
    plan.step()
    (found_inf if what == "found_inf" else masters[0]).share_memory_()
    with pytest.raises(RuntimeError, match=re.escape(f"{what} has moved")):
        plan.step()
    plan.refresh()
    masters[0][0] = torch.nan
    plan.step()
    assert found_inf.item() == 1


def test_a_moved_shard_buffer_is_noticed(device):
    weights, masters, starts = make(device, ((16, 16),))
    buffer = torch.zeros(128, dtype=torch.uint8, device=device)
    plan = zerofp4.CastPlan(weights, masters, starts, fsdp_shard_model_weights=[buffer])
    plan.step()
    buffer.data = torch.zeros_like(buffer)
    with pytest.raises(RuntimeError, match=r"fsdp_shard_model_weights\[0\] has moved"):
        plan.check()
    plan.refresh()
    plan.step()
    expected = reference.quantize(masters[0].view(16, 16).bfloat16()).rowwise_data
    assert_bytes_equal(buffer, expected.view(-1), "codes")


@needs_gpu
def test_what_a_plan_still_reads_stays_allocated():
    """Until the exchange is noticed, steps cast the old values, in memory that nobody else was given."""
    weights, masters, starts = make("cuda")
    plan = zerofp4.CastPlan(weights, masters, starts)
    old = [master.clone() for master in masters]
    address, size = masters[0].data_ptr(), masters[0].numel()
    masters[0].data = torch.full((size,), torch.nan, device="cuda")
    poison = [torch.full((size,), torch.nan, device="cuda") for _ in range(64)]
    assert address not in [p.data_ptr() for p in poison]
    plan.step()
    check(weights, old)
    with pytest.raises(RuntimeError, match="has moved"):
        plan.post()
    with pytest.raises(RuntimeError, match="has moved"):
        plan.step()
    plan.refresh()


def test_refresh_checks_masters_again(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    kept = masters[1].data
    for other, error, message in (
        (kept[:200].clone(), ValueError, r"master_weights\[1\] must keep its 256 elements, has 200"),
        (kept.half(), TypeError, r"master_weights\[1\] must be a float32 or bfloat16 tensor"),
        (kept.view(16, 16).clone(), ValueError, "must be one-dimensional"),
    ):
        masters[1].data = other
        with pytest.raises(error, match=message):
            plan.refresh()
        with pytest.raises(RuntimeError, match=r"master_weights\[1\] has moved"):
            plan.check()
    masters[1].data = kept.bfloat16()
    plan.refresh()
    plan.step()
    check(weights, masters)


# Autograd versions


def test_versions_advance_where_the_weights_are_complete(device):
    weights, masters, starts = make(device, ((16, 16),))
    plan = zerofp4.CastPlan(weights, masters, starts)
    x = torch.ones(2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = torch.nn.functional.linear(x, weights[0])
    version = weights[0]._version
    plan.step()
    assert weights[0]._version == version
    plan.all_gather()
    plan.post()
    assert weights[0]._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("again", [False, True])
def test_every_function_advances_versions(device, again):
    weights, masters, starts = make(device)
    calls = [
        lambda: cast(weights, masters, starts),
        lambda: zerofp4.all_gather_nvfp4(weights, starts, [m.numel() for m in masters]),
        lambda: zerofp4.post_all_gather_processing(weights),
    ]
    for call in calls:
        if again:
            call()
        versions = [weight._version for weight in weights]
        call()
        assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))


def test_versions_advance_where_a_step_raises_after_it_wrote(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts, on_nonfinite="raise")
    masters[1][3] = torch.nan
    version = weights[0]._version
    with pytest.raises(FloatingPointError):
        plan.step()
    assert weights[0]._version > version


# On a GPU


@needs_gpu
def test_a_step_allocates_nothing_and_waits_for_nothing():
    weights, masters, starts = make("cuda", [(34, 288)] * 257)
    plan = zerofp4.CastPlan(weights, masters, starts)
    again = [master.clone() for master in masters]
    for _ in range(2):
        plan.step()
        cast(weights, masters, starts)
    torch.cuda.synchronize()
    with nothing_waits():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            plan.step()
        cast(weights, masters, starts)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        # Masters that moved: new addresses in the old tables, and no waiting either.
        cast(weights, again, starts)
        plan.refresh()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        plan.step()
    plan.post()
    check(weights, masters)


@needs_gpu
@pytest.mark.parametrize("count", [1, 2])
def test_memory_of_a_plan_waits_for_other_streams(count):
    weights, masters, starts = make("cuda", [(34, 288)] * count)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        plan.step()
    freed = {plan.reduced.data_ptr(): plan.reduced.nbytes}
    freed |= {table.data_ptr(): table.nbytes for table in plan._stages.tables}
    del plan
    taken = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in freed.values() for _ in range(8)]
    assert not stream.query(), "the stream was done too early to show anything"
    assert freed.keys().isdisjoint(t.data_ptr() for t in taken)
    torch.cuda.synchronize()
    check(weights, masters)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_plan_on_another_gpu_than_the_current_one():
    weights, masters, starts = make("cuda:1")
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()  # its first call loads the kernels, which takes long
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(10**9)
    plan.step()
    stream = torch.cuda.current_stream(1)
    assert not stream.query(), "the stream was done too early to show anything"
    plan.check()
    assert stream.query()
    check(weights, masters)
