"""CastPlan and the cast function in a world of one: pieces, options, and everything that is refused."""

import weakref

import pytest
import torch
from cases.cast import check, make
from helpers import collect_garbage, needs_gpu

import zerofp4


def test_no_weights():
    zerofp4.cast_master_weights_to_nvfp4([], [], [])
    zerofp4.all_gather_nvfp4([], [], [])
    zerofp4.post_all_gather_processing([])


@pytest.mark.parametrize("name", ["data", "rowwise_data.data"])
def test_another_record_and_codes_exchanged_behind_theirs_are_noticed(device, name):
    """On a GPU, step() sees codes only once post() has: it looks at all addresses."""
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    moved = weights[1] if name == "data" else weights[1].rowwise_data
    moved.data = moved.data.clone()
    calls = [plan.step] if name == "data" or device.type == "cpu" else []
    for call in (*calls, plan.post, plan.step, plan.all_gather):
        with pytest.raises(RuntimeError, match=r"model_weights\[1\]: rowwise_data has moved"):
            call()
    plan.refresh()
    masters[1].mul_(2)
    plan.step()
    check(weights, masters)


def test_rebinding_another_tensor_does_not_disturb_a_plan(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    other = zerofp4.empty((16, 16), device=device)
    other.rowwise_data = other.rowwise_data.clone()
    plan.step()
    check(weights, masters)


def test_cached_plans_die_with_their_weight():
    weights, masters, starts = make("cpu")
    zerofp4.cast_master_weights_to_nvfp4(weights, masters, starts)
    record = weakref.ref(weights[0].record)
    del weights, masters
    collect_garbage()
    assert record() is None


def refused(error, message, weights, masters, starts, *args, **kwargs):
    """The plan and the function refuse the same, and nothing is written."""
    before = [w.rowwise_data.clone() for w in weights if isinstance(w, zerofp4.NVFP4Tensor)]
    with pytest.raises(error, match=message):
        zerofp4.cast_master_weights_to_nvfp4(weights, masters, starts, *args, **kwargs)
    if args:
        kwargs["fsdp_shard_model_weights"] = args[1]
    with pytest.raises(error, match=message):
        zerofp4.CastPlan(weights, masters, starts, **kwargs)
    after = [w.rowwise_data for w in weights if isinstance(w, zerofp4.NVFP4Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_bad_weights():
    columnwise = zerofp4.quantize(torch.zeros(16, 16), rowwise=False, columnwise=True)
    with pytest.raises(ValueError, match="has no rowwise data"):
        zerofp4.CastPlan([columnwise], [torch.zeros(256)], [0])
    with pytest.raises(ValueError, match="last dimension must be even, got 15"):
        zerofp4.empty((16, 15))


@pytest.mark.parametrize(
    ("codes", "error", "message"),
    [
        (torch.zeros(4), TypeError, r"fsdp_shard_model_weights\[0\] must be a torch.uint8 tensor"),
        (torch.zeros(4, dtype=torch.uint8), ValueError, r"must have shape \(5,\), got \(4,\)"),
        (torch.zeros(10, dtype=torch.uint8)[::2], ValueError, "must be contiguous"),
        (None, TypeError, r"fsdp_shard_model_weights\[0\] must be a torch.uint8 tensor, got NoneType"),
    ],
)
def test_bad_shard_buffers(codes, error, message):
    """Elements 1..8 lie in bytes 0..4. Also after a call that was good."""
    weights, masters = [zerofp4.empty((16, 16))], [torch.ones(8)]
    for _ in range(2):
        refused(error, message, weights, masters, [1], None, [codes])
        good = torch.zeros(5, dtype=torch.uint8)
        zerofp4.cast_master_weights_to_nvfp4(weights, masters, [1], None, [good])
        assert good[1:4].eq(0x77).all()


def test_bad_options():
    weights, masters, starts = make("cpu")
    refused(ValueError, "fsdp_shard_model_weights has 1", weights, masters, starts, None, [None])
    again = [[weights[0]], [weights[0]]]
    refused(ValueError, "in an amax group already", weights, masters, starts, amax_groups=again)
    with pytest.raises(ValueError, match="group was given, but torch"):
        zerofp4.CastPlan(weights, masters, starts, object())


def test_bad_post():
    with pytest.raises(TypeError, match=r"model_weights\[0\] must be an NVFP4Tensor, got Tensor"):
        zerofp4.post_all_gather_processing([torch.zeros(2, 2)])
    with pytest.raises(TypeError, match="model_weights must be a list or tuple, got Tensor"):
        zerofp4.post_all_gather_processing(torch.zeros(2, 2))


def test_bad_gather():
    weights, _, starts = make("cpu")
    for numels, message in (
        ([9792, 255], r"model_weights\[1\]: elements 255..255 of 256 are owned by no rank"),
        ([9792], "shard_numels has 1 entries for 2"),
        ([9792, -1], r"shard_numels\[1\] must not be negative, got -1"),
        ([9792, 257], r"start_offset 0 \+ 257 elements exceeds"),
    ):
        with pytest.raises(ValueError, match=message):
            zerofp4.all_gather_nvfp4(weights, starts, numels)
    with pytest.raises(ValueError, match="start_offset is None, but the shard has 256 elements"):
        zerofp4.all_gather_nvfp4(weights, [0, None], [9792, 256])
    with pytest.raises(TypeError, match=r"shard_numels\[0\] must be an int, got float"):
        zerofp4.all_gather_nvfp4(weights, starts, [9792.0, 256])


@needs_gpu
def test_shard_on_another_device_than_its_weight():
    weight = zerofp4.empty((16, 16), device="cuda")
    refused(ValueError, "is on cpu, its weight .* on cuda:0", [weight], [torch.zeros(256)], [0])


def test_the_repr_of_a_plan(device):
    weights = [zerofp4.empty((32, 32), device=device), zerofp4.empty((2, 16, 16), device=device)]
    plan = zerofp4.CastPlan(weights, [torch.zeros(100, device=device), None], [7, None])
    assert repr(plan) == (
        "CastPlan(weights=2, elements=1536, on_this_rank=100, ranks=1, amax_groups=2, "
        f"device='{device}', on_nonfinite='skip')"
    )
