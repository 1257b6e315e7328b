"""Casts of sharded masters: the bytes of quantizing the whole, at any world size and sharding, and every
error.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal

import zerofp4
from distributed.cases import SHAPES, SPLITS, Model
from distributed.run import on_ranks
from zerofp4 import cast, gather, reference
from zerofp4.storage import allocate


def cast_and_gather(model: Model, **options) -> None:
    zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts, **options)
    zerofp4.all_gather_nvfp4(model.weights, model.starts, model.numels)
    zerofp4.post_all_gather_processing(model.weights)


def raised_everywhere(world, error: type, function, *args, **kwargs) -> str:
    """Asserts that every rank raises `error`, and with the same message; returns it."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    messages: list = [None] * world.world_size
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", SPLITS)
def test_functions_equal_the_whole(world, how):
    model = Model(world, how)
    cast_and_gather(model)
    model.check()
    # Again with other values: the plans are there now, the masters have moved.
    model.whole = [whole * -3 + 1 for whole in model.whole]
    model.cut()
    cast_and_gather(model)
    model.check()
    assert len(model.weights[0].record.attachments["cast_plans"]) == 1
    assert len(model.weights[0].record.attachments["gather_plans"]) == 1


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", SPLITS)
def test_plan_equals_the_whole(world, how):
    model = Model(world, how, seed=7)
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    for _ in range(3):
        plan.step()
        plan.all_gather()
        plan.post()
        model.check()
        model.whole = [whole.sin() * 100 for whole in model.whole]
        for master, whole, start, numel in zip(
            model.masters, model.whole, model.starts, model.numels, strict=True
        ):
            if master is not None:
                master.copy_(whole.flatten()[start : start + numel])


@on_ranks(2, launcher="mpirun")
def test_functions_equal_the_whole_under_mpirun(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    model.check()


@on_ranks(3)
def test_one_all_reduce_a_step(world):
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append("all_reduce"), original(*args, **kwargs))[1]
    try:
        plan.step()
        zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts)
        del calls[:]
        zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts)
    finally:
        dist.all_reduce = original
    assert calls == ["all_reduce"]


@on_ranks(2, 3)
def test_amax_groups(world):
    model = Model(world, "odd")
    groups = [[0, 2], [1, 5]]
    members = [[model.weights[i] for i in group] for group in groups]
    cast_and_gather(model, amax_groups=members)
    model.check(groups)


@on_ranks(2, 3)
def test_fsdp_shard_model_weights(world):
    """Codes into shard buffers of exactly the shard's bytes; rowwise_data stays as it was."""
    model = Model(world, "odd")
    before = [weight.rowwise_data.clone() for weight in model.weights]
    buffers = []
    for start, numel in zip(model.starts, model.numels, strict=True):
        size = (start + numel + 1) // 2 - start // 2 if numel else 0
        buffers.append(torch.full((size,), 0xA5, dtype=torch.uint8, device=world.device) if numel else None)
    zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts, None, buffers)
    for i, (weight, buffer) in enumerate(zip(model.weights, buffers, strict=True)):
        assert_bytes_equal(weight.rowwise_data, before[i], f"rowwise_data {i}")
        if buffer is None:
            continue
        whole = model.whole[i].to(weight.dtype)
        expected = torch.full_like(buffer, 0xA5)
        tiles, amax = reference.partial_amax(whole.float().flatten(), 0, whole.shape, weight.dtype)
        reference.partial_cast(
            model.masters[i], model.starts[i], whole.shape, weight.dtype, tiles, amax, expected
        )
        assert_bytes_equal(buffer, expected, f"shard {i}")
        assert_bytes_equal(weight.rowwise_scale, reference.block_scale(tiles, amax), f"scale {i}")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, fsdp_shard_model_weights=buffers)
    with pytest.raises(ValueError, match="fsdp_shard_model_weights: gather those"):
        plan.all_gather()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_nonfinite_master_on_one_rank_is_skipped_on_all(world, bad):
    """3.4e38 is finite in float32 and infinite in bfloat16. The group of the bad weight keeps everything."""
    model = Model(world, "odd")
    found_inf = torch.zeros(1, device=world.device)
    groups = [[model.weights[3], model.weights[4]]]
    before = [b.clone() for i in (3, 4) for _, b in model.weights[i].record.buffers()]
    if world.rank == world.world_size - 1:
        model.masters[3][0] = bad
    cast_and_gather(model, amax_groups=groups, found_inf=found_inf)
    assert found_inf.item() == 1.0
    after = [(n, b) for i in (3, 4) for n, b in model.weights[i].record.buffers()]
    for old, (name, new) in zip(before, after, strict=True):
        if name != "columnwise_data":  # the transpose of unchanged codes
            assert_bytes_equal(new, old, name)
    model.check(skip=(3, 4))


@on_ranks(1, 2, 3)
def test_nonfinite_master_on_one_rank_raises_on_all(world):
    model = Model(world, "odd")
    model.weights[3].record.name = "layers.3"
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, on_nonfinite="raise")
    if world.rank == world.world_size - 1:
        model.masters[3][0] = float("nan")
    message = raised_everywhere(world, FloatingPointError, plan.step)
    assert "model_weights[3] 'layers.3'" in message and "model_weights[2]" not in message
    if world.rank == world.world_size - 1:
        model.masters[3][0] = 0.5
    plan.step()


@on_ranks(3)
def test_subgroup(world):
    """A group of ranks 2 and 0; the rank that is not in it is told so."""
    group = dist.new_group([0, 2])
    model = Model(world, "odd")
    if world.rank == 1:
        with pytest.raises(ValueError, match="group does not contain the calling process"):
            zerofp4.CastPlan(model.weights, model.masters, model.starts, group)
        return
    local = type(world)(dist.get_rank(group), 2, world.local_rank, world.device, world.backend)
    model = Model(local, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts, group)
    plan.step()
    plan.all_gather()
    plan.post()
    model.check()


# Ranks that disagree, and errors on one rank only


@on_ranks(2, 3, time_limit=30)
def test_disagreement_about_shapes(world):
    shape = (16, 32) if world.rank == 1 else (32, 16)
    weight = zerofp4.empty(shape, device=world.device)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, [weight], [None], [None])
    assert message == (
        "model_weights[0] must be the same on all ranks, but has shape (32, 16) and dtype torch.bfloat16 "
        "on rank 0, (16, 32) and torch.bfloat16 on rank 1"
    )


@on_ranks(2, 3, time_limit=30)
def test_disagreement_about_the_number_of_weights(world):
    weights = [zerofp4.empty((16, 16), device=world.device) for _ in range(1 + (world.rank == 1))]
    empty = [None] * len(weights)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, weights, empty, empty)
    assert message == "rank 0 has 1 model_weights, rank 1 has 2"


@on_ranks(2, 3, time_limit=30)
def test_two_owners_of_one_element(world):
    weight = zerofp4.empty((16, 16), device=world.device)
    start, numel = [(0, 101), (100, 156), (256, 0)][world.rank]
    master = torch.zeros(numel, device=world.device)
    message = raised_everywhere(world, ValueError, zerofp4.CastPlan, [weight], [master], [start])
    assert message == "model_weights[0]: ranks 0 and 1 both own elements 100..100"


@on_ranks(2, 3, time_limit=30)
def test_invalid_argument_on_one_rank(world):
    model = Model(world, "even")
    if world.rank == 1:
        model.masters[2] = model.masters[2].double()
    before = model.snapshot()
    message = raised_everywhere(
        world, TypeError, zerofp4.cast_master_weights_to_nvfp4, model.weights, model.masters, model.starts
    )
    assert message == "rank 1: master_weights[2] must be a float32 or bfloat16 tensor, got torch.float64"
    model.check_untouched(before)


@on_ranks(2, 3, time_limit=30)
def test_invalid_argument_on_one_rank_after_the_plan_was_built(world):
    """That rank raises its own error, the others hear of it, nobody writes, and the next step works."""
    model = Model(world, "odd")
    cast_and_gather(model)
    before = model.snapshot()
    masters = list(model.masters)
    if world.rank == 1:
        masters[2] = masters[2].double()
    expected = TypeError if world.rank == 1 else RuntimeError
    message = "must be a float32 or bfloat16" if world.rank == 1 else "another rank could not take part"
    with pytest.raises(expected, match=message):
        zerofp4.cast_master_weights_to_nvfp4(model.weights, masters, model.starts)
        model.weights[0].record.attachments["cast_plans"][0].check()
    model.check_untouched(before)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_storage_that_moved_on_one_rank(world):
    """step() raises everywhere and writes nowhere; refresh() and the function take the new address."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    plan.step()
    plan.all_gather()
    plan.post()
    if world.rank == 1:
        model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
    before = model.snapshot()
    match = r"model_weights\[2\]: rowwise_data has moved" if world.rank == 1 else "another rank could not"
    with pytest.raises(RuntimeError, match=match):
        plan.step()
        plan.check()
    model.check_untouched(before)
    plan.refresh()
    plan.step()
    plan.all_gather()
    plan.post()
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_ranks_that_step_different_plans_of_one_size(world):
    model = Model(world, "odd")
    plans = [
        zerofp4.CastPlan(model.weights, model.masters, model.starts),
        zerofp4.CastPlan(model.weights, model.masters, model.starts, on_nonfinite="raise"),
    ]
    before = model.snapshot()
    with pytest.raises(RuntimeError, match="different cast plans"):
        plan = plans[world.rank % 2]
        plan.step()
        plan.check()
    model.check_untouched(before)


@on_ranks(2, 3, time_limit=30)
def test_steps_go_on_after_an_error_of_one_rank(world):
    """The error is told once: it must not keep later steps, in which all ranks take part, from writing."""
    model = Model(world, "odd")
    plan = zerofp4.CastPlan(model.weights, model.masters, model.starts)
    raised = []
    for step in range(6):
        if step == 2 and world.rank == 1:
            model.weights[2].rowwise_data = model.weights[2].rowwise_data.clone()
        try:
            plan.step()
            if step == 5:
                plan.check()  # on a GPU all steps may be queued before the host comes to see the error
        except RuntimeError as error:
            raised.append((step, str(error)))
            if "has moved" in str(error):
                plan.refresh()
    if world.rank == 1:
        assert [step for step, _ in raised] == [2] and "has moved" in raised[0][1]
    else:
        assert len(raised) == 1 and "another rank could not take part" in raised[0][1]
    plan.all_gather()
    plan.post()
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_all_ranks_may_change_shards_and_options(world):
    model, other = Model(world, "odd"), Model(world, "even")
    cast_and_gather(model)
    model.shards = other.shards
    model.cut()
    groups = [[model.weights[0], model.weights[2]]]
    cast_and_gather(model, amax_groups=groups)
    model.check([[0, 2]])
    cast_and_gather(model)
    model.check()
    attachments = model.weights[0].record.attachments
    assert len(attachments["cast_plans"]) == len(attachments["gather_plans"]) == 1


@on_ranks(2, 3, time_limit=30)
@pytest.mark.parametrize("what", ["shards", "amax_groups", "on_nonfinite"])
def test_one_rank_changes_shards_or_options_after_the_plan_was_built(world, what):
    model = Model(world, "odd")
    cast_and_gather(model)
    before = model.snapshot()
    starts, masters, options = list(model.starts), list(model.masters), {}
    if world.rank == 1 and what == "shards":
        starts[2], masters[2] = None, None
    elif world.rank == 1:
        options = {"amax_groups": [model.weights[:2]]} if what == "amax_groups" else {"on_nonfinite": "raise"}
    error = ValueError if world.rank == 1 else RuntimeError
    with pytest.raises(error, match=r"change on all ranks or on none|another rank could not take part"):
        zerofp4.cast_master_weights_to_nvfp4(model.weights, masters, starts, **options)
        model.weights[0].record.attachments["cast_plans"][0].check()
    model.check_untouched(before)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 3, time_limit=30)
def test_gather_after_shards_changed_on_one_rank(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    starts, numels = list(model.starts), list(model.numels)
    if world.rank == 1:
        starts[2], numels[2] = None, 0
    before = model.snapshot()
    message = raised_everywhere(world, RuntimeError, zerofp4.all_gather_nvfp4, model.weights, starts, numels)
    assert message.startswith("rank 1 owns other shards than before, rank 0 the same")
    model.check_untouched(before)


@on_ranks(2, 3, time_limit=30)
def test_found_inf_is_a_rank_s_own_business(world):
    """A new flag on some ranks, none on others: no plan is built anew."""
    model = Model(world, "odd")
    cast_and_gather(model)
    plan = model.weights[0].record.attachments["cast_plans"][0]
    for _ in range(2):
        options = {"found_inf": torch.zeros(1, device=world.device)} if world.rank else {}
        if world.rank == 1:
            model.masters[3][0] = torch.nan
        cast_and_gather(model, **options)
        assert world.rank == 0 or options["found_inf"].item() == 1
    assert model.weights[0].record.attachments["cast_plans"] == [plan]


@on_ranks(2, 3, time_limit=30)
def test_disagreement_about_options(world):
    model = Model(world, "odd")
    for options, expected in (
        ({"on_nonfinite": "raise"}, "on_nonfinite must be the same on all ranks, but is 'skip' on rank 0"),
        (
            {"amax_groups": [model.weights[:2]]},
            "amax_groups must be the same on all ranks, but is [] on rank 0",
        ),
    ):
        mine = options if world.rank == 1 else {}
        message = raised_everywhere(
            world, ValueError, zerofp4.CastPlan, model.weights, model.masters, model.starts, **mine
        )
        assert message.startswith(expected), message


@on_ranks(2, time_limit=30)
@pytest.mark.parametrize("case", ["weights", "masters", "amax_groups", "manual_post"])
def test_nonsense_on_one_rank(world, case):
    """Not only wrong values: whatever goes wrong on one rank, the others hear of it."""
    model = Model(world, "odd")
    arguments = [model.weights, model.masters, model.starts, None, None, True]
    options = {}
    if world.rank == 1:
        arguments[0] = None if case == "weights" else arguments[0]
        arguments[1] = 5 if case == "masters" else arguments[1]
        arguments[5] = case != "manual_post"
        options = {"amax_groups": torch.zeros(3)} if case == "amax_groups" else {}
    expected = ValueError if case == "manual_post" else TypeError
    call = zerofp4.cast_master_weights_to_nvfp4
    assert raised_everywhere(world, expected, call, *arguments, **options).startswith("rank 1: ")


@on_ranks(3, time_limit=30)
def test_functions_refuse_a_group_without_the_caller(world):
    group = dist.new_group([0, 2])
    model = Model(world, "odd")
    if world.rank == 1:
        for call, lists in (
            (zerofp4.cast_master_weights_to_nvfp4, (model.masters, model.starts)),
            (zerofp4.all_gather_nvfp4, (model.starts, model.numels)),
        ):
            with pytest.raises(ValueError, match="group does not contain the calling process"):
                call(model.weights, *lists, group)


# The gather


@on_ranks(2, 3, time_limit=30)
def test_gather_refuses_overlapping_and_missing_shards(world):
    weight = zerofp4.empty((16, 16), device=world.device)
    for spans, expected in (
        ([(0, 101), (100, 156), (0, 0)], "model_weights[0]: ranks 0 and 1 both own elements 100..100"),
        ([(0, 99), (100, 156), (0, 0)], "model_weights[0]: elements 99..99 of 256 are owned by no rank"),
        ([(0, 99), (99, 156), (0, 0)], "model_weights[0]: elements 255..255 of 256 are owned by no rank"),
    ):
        start, numel = spans[world.rank]
        message = raised_everywhere(world, ValueError, zerofp4.all_gather_nvfp4, [weight], [start], [numel])
        assert message == expected


@on_ranks(2, 3, time_limit=30)
def test_plan_refuses_to_gather_what_nobody_owns(world):
    weight = zerofp4.empty((16, 16), device=world.device)
    start, numel = [(0, 99), (100, 156), (0, 0)][world.rank]
    plan = zerofp4.CastPlan([weight], [torch.ones(numel, device=world.device)], [start])
    plan.step()
    assert "elements 99..99 of 256 are owned by no rank" in raised_everywhere(
        world, ValueError, plan.all_gather
    )


@on_ranks(2, 3, time_limit=30)
def test_gather_error_on_one_rank_after_the_first_call(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    before = model.snapshot()
    numels = list(model.numels)
    if world.rank == 1:
        numels[2] = -5
    expected, match = (ValueError, "-5") if world.rank == 1 else (RuntimeError, "rank 1 found an error")
    with pytest.raises(expected, match=match):
        zerofp4.all_gather_nvfp4(model.weights, model.starts, numels)
    model.check_untouched(before)
    cast_and_gather(model)
    model.check()


@on_ranks(2, 4)
def test_gather_after_storage_moved(world):
    model = Model(world, "odd")
    cast_and_gather(model)
    for weight in model.weights:
        weight.rowwise_data = torch.zeros_like(weight.rowwise_data)
    cast_and_gather(model)
    model.check()


@on_ranks(3)
def test_a_rank_that_owns_nothing_at_all(world):
    model = Model(world, "last")
    assert (world.rank < 2) == all(master is None for master in model.masters)
    cast_and_gather(model)
    model.check()


@on_ranks(2)
def test_ranks_may_keep_different_layouts(world):
    """Scales never travel, so what a rank keeps of them is its own business."""
    shape = SHAPES[2]
    layouts = ("compact", "swizzled") if world.rank else ("compact",)
    record = allocate(
        shape, dtype=torch.bfloat16, device=world.device, columnwise=bool(world.rank), scale_layouts=layouts
    )
    weight = zerofp4.NVFP4Tensor(record)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(world.device)
    half = whole.numel() // 2 | 1
    start, end = (0, half) if world.rank == 0 else (half, whole.numel())
    plan = zerofp4.CastPlan([weight], [whole.flatten()[start:end]], [start])
    plan.step()
    plan.all_gather()
    plan.post()
    expected = reference.quantize(whole.bfloat16())
    assert_bytes_equal(weight.rowwise_data, expected.rowwise_data, "codes")
    if world.rank:
        assert_bytes_equal(weight.columnwise_data, expected.columnwise_data, "columnwise codes")


@on_ranks(2)
@pytest.mark.parametrize("call", ["plan", "cast", "gather"])
def test_a_device_that_one_rank_cannot_use_is_agreed_on(world, call):
    def refuse(device):
        raise RuntimeError(f"zerofp4 cannot run on {device}")

    model = Model(world, "odd")
    arguments = (model.weights, model.starts, model.numels)
    if call == "gather":
        function = zerofp4.all_gather_nvfp4
    else:
        function = zerofp4.CastPlan if call == "plan" else zerofp4.cast_master_weights_to_nvfp4
        arguments = (model.weights, model.masters, model.starts)
    before = model.snapshot()
    module = gather if call == "gather" else cast
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(module, "target_of", refuse)
        message = raised_everywhere(world, RuntimeError, function, *arguments)
    assert message.startswith("rank 1: zerofp4 cannot run on")
    model.check_untouched(before)
