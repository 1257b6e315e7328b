"""FusedAdamW leaves in a plan's reduced vector what the plan itself would compute from the masters."""

import copy
import math

import pytest
import torch
from cast_cases import check, check_transposes, make
from fused_cases import OPTIONS, Expected, set_gradient
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st

import zerofp4
from zerofp4.optim import FusedAdamW


@st.composite
def shards(draw):
    """(shape, dtype, start, numel, offset of the master in its buffer, dtype of the gradient or None)"""
    rows, cols = draw(st.integers(1, 40)), 2 * draw(st.integers(1, 140))
    experts = draw(st.sampled_from([None, None, 1, 3]))
    shape = (rows, cols) if experts is None else (experts, rows, cols)
    size = math.prod(shape)
    start = draw(st.integers(0, size - 1))
    numel = draw(st.one_of(st.just(size - start), st.integers(1, size - start)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    gradient = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, None]))
    return shape, dtype, start, numel, draw(st.integers(0, 4)), gradient


def offered(device, *shapes, **options):
    """(plan, the optimizer of its masters, which it was offered to, weights, masters, start offsets)"""
    weights, masters, starts = make(device, *shapes)
    plan = zerofp4.CastPlan(weights, masters, starts)
    optimizer = FusedAdamW(masters, **OPTIONS, **options)
    optimizer.offer_amaxes(plan)
    return plan, optimizer, weights, masters, starts


def compare_with_the_plans_own(plan: zerofp4.CastPlan, weights, masters, starts, **options) -> None:
    """The whole vector, header included, is that of a plan which takes the amaxes itself."""
    own = zerofp4.CastPlan(weights, masters, starts, **options)
    own.step()
    assert_bytes_equal(plan.reduced, own.reduced, "reduced vector")


@given(pieces=st.lists(shards(), min_size=1, max_size=4), grouped=st.booleans(), seed=st.integers(0, 99))
def test_amaxes_of_shards(device, pieces, grouped, seed):
    generator = torch.Generator().manual_seed(seed)
    weights, masters, starts = [], [], []
    for shape, dtype, start, numel, offset, _ in pieces:
        weights.append(zerofp4.empty(shape, dtype=dtype, device=device, columnwise=False))
        values = torch.randn(offset + numel, generator=generator) * 10.0 ** (
            seed % 9 - 4
        )  # beyond float16 too
        masters.append(values.to(device)[offset:])
        starts.append(start)
    alike = len(weights) > 1 and weights[0].record.experts == weights[1].record.experts
    groups = {"amax_groups": [weights[:2]]} if grouped and alike else {}
    plan = zerofp4.CastPlan(weights, masters, starts, **groups)
    extra = torch.randn(3000, generator=generator).to(device)
    # The optimizer's tensors are other objects on the same memory.
    parameters = [extra, *(master.view(-1) for master in masters)]
    optimizer = FusedAdamW(parameters, **OPTIONS)
    optimizer.offer_amaxes(plan)
    expected = Expected(optimizer)
    for step in range(2):
        for p, (*_, dtype) in zip(parameters, [(torch.float32,), *pieces], strict=True):
            values = torch.randn(p.numel(), generator=generator).to(device)
            set_gradient(p, None if dtype is None else values.to(dtype))
        plan.reduced.fill_(123)
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")
        compare_with_the_plans_own(plan, weights, masters, starts, **groups)


@pytest.mark.threads
def test_large_weights_on_many_threads(device):
    shapes = ((512, 1024), (300, 2872), (48, 128), (1024, 130))
    plan, optimizer, weights, masters, starts = offered(device, shapes)
    for i, master in enumerate(masters):
        set_gradient(master, torch.randn_like(master).to(torch.bfloat16 if i % 2 else torch.float32))
    optimizer.step()
    compare_with_the_plans_own(plan, weights, masters, starts)
    plan.step()
    check(weights, masters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38, 65519.0, 65520.0, 1e-45, 6e-8, 0.0])
def test_amaxes_of_values_at_the_edges(device, dtype, value):
    weights = [zerofp4.empty((32, 160), dtype=dtype, device=device)]
    masters = [torch.zeros(32 * 160, device=device)]
    masters[0][17 * 160 + 155] = value
    plan = zerofp4.CastPlan(weights, masters, [0])
    optimizer = FusedAdamW(masters, lr=0.0, weight_decay=0.0)
    optimizer.offer_amaxes(plan)
    for gradient in (None, torch.zeros_like(masters[0])):
        masters[0].grad = gradient
        plan.reduced.fill_(123)
        optimizer.step()
        compare_with_the_plans_own(plan, weights, masters, [0])


def test_training_steps(device):
    """Update and cast, as often as one likes, also where one of the two is left out."""
    plan, optimizer, weights, masters, _ = offered(device)
    for step in range(6):
        for master in masters:
            master.grad = torch.randn_like(master)
        if step != 3:
            optimizer.step()
        if step == 4:
            optimizer.step()
        if step != 2:
            plan.step()
            plan.post()
            check(weights, masters)
            check_transposes(weights, masters)
        if step == 5:
            for master in masters:
                master.mul_(3)
            plan.step()
            check(weights, masters)


@pytest.mark.parametrize("in_one_buffer", [True, False])
def test_amaxes_of_masters_that_were_written_are_outdated(device, in_one_buffer):
    weights, masters, starts = make(device)
    if in_one_buffer:
        buffer = torch.cat(masters)
        masters = list(buffer.split([master.numel() for master in masters]))
    plan = zerofp4.CastPlan(weights, masters, starts)
    optimizer = FusedAdamW(masters, **OPTIONS)
    assert not optimizer.amaxes_outdated()
    optimizer.offer_amaxes(plan)
    assert not optimizer.amaxes_outdated()
    for master in masters:
        master.grad = torch.randn_like(master)
        optimizer.step()
        assert not optimizer.amaxes_outdated()
        master.mul_(50)
        assert optimizer.amaxes_outdated()
        plan.begin_update()
        plan.step()
        check(weights, masters)


def test_a_master_without_gradient_is_only_read(device):
    plan, optimizer, weights, masters, _ = offered(device)
    before = masters[0].clone()
    masters[1].grad = torch.randn_like(masters[1])
    optimizer.step()
    plan.step()
    assert_bytes_equal(masters[0], before, "master")
    assert list(optimizer.state) == [masters[1]]
    check(weights, masters)


@pytest.mark.parametrize("when", ["gradient", "update"])
def test_after_a_step_that_raises_the_plan_takes_the_amaxes_itself(device, monkeypatch, when):
    plan, optimizer, weights, masters, _ = offered(device)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    if when == "gradient":
        set_gradient(masters[1], masters[1].half())
    else:

        def fail(brought):
            raise RuntimeError("no gradient today")

        monkeypatch.setattr(optimizer._parts[0].stage, "update", fail)
        plan.step()
    with pytest.raises((RuntimeError, TypeError), match="gradient"):
        optimizer.step()
    if when == "update":
        for master in masters:
            master.mul_(-2)
    plan.step()
    check(weights, masters)


def test_an_offer_after_the_masters_moved(device):
    plan, optimizer, weights, masters, starts = offered(device)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    for master in masters:
        master.data = master.data.clone()
    plan.refresh()
    optimizer.offer_amaxes(plan)
    optimizer.step()
    compare_with_the_plans_own(plan, weights, masters, starts)
    plan.step()
    check(weights, masters)


def test_a_rank_that_owns_nothing(device):
    weights, *_ = make(device)
    plan = zerofp4.CastPlan(weights, [None, None], [None, None])
    optimizer = FusedAdamW([{"params": []}], **OPTIONS)
    optimizer.offer_amaxes(plan)
    plan.reduced.fill_(123)
    optimizer.step()
    compare_with_the_plans_own(plan, weights, [None, None], [None, None])


def experts_offered(device):
    """(plan, the optimizer of its masters, weights, masters); the shard begins in the first of 3 experts."""
    weights = [zerofp4.empty((3, 18, 34), device=device), zerofp4.empty((16, 32), device=device)]
    masters = [torch.randn(3 * 18 * 34 - 7, device=device), torch.randn(512, device=device)]
    plan = zerofp4.CastPlan(weights, masters, [7, 0])
    optimizer = FusedAdamW(masters, **OPTIONS)
    optimizer.offer_amaxes(plan)
    return plan, optimizer, weights, masters


def test_steps_of_experts_are_those_of_their_parameter(device):
    """Counted once for all of them, also where somebody sets the counter, loads a state, or steps in between
    without the plan.
    """
    plan, optimizer, weights, masters = experts_offered(device)
    expected = Expected(optimizer)
    saved = None
    for step in range(8):
        for i, master in enumerate(masters):
            set_gradient(master, None if (step, i) == (2, 0) else torch.randn_like(master))
        if step == 3:
            optimizer.state[masters[0]]["step"].fill_(77)
            expected.steps[0] = 77
        if step == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            kept = copy.deepcopy((expected.steps, expected.moments))
        if step == 6:
            optimizer.load_state_dict(saved)
            expected.steps, expected.moments = kept
        plan.reduced.fill_(123)
        expected.step()
        optimizer.step()
        expected.check(f"step {step}:")
        compare_with_the_plans_own(plan, weights, masters, [7, 0])


def test_masters_of_experts_that_are_refused(device):
    plan, _, _, masters = experts_offered(device)
    for others in ([masters[1]], [masters[0][:605], masters[1]], [masters[0][:-1], masters[1]]):
        with pytest.raises(
            ValueError, match=r"master_pieces\(\)\[\d\].master .* is not one of the optimizer"
        ):
            FusedAdamW(others).offer_amaxes(plan)


def test_offers_that_are_refused(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    message = (
        r"master_pieces\(\)\[1\].master \(torch.float32, elements 0 to 256 of a weight \[16, 16\]\) is not"
    )
    for others in ([masters[0]], [masters[0], masters[1][:255]], [masters[0], masters[1].clone()]):
        with pytest.raises(ValueError, match=message):
            FusedAdamW(others).offer_amaxes(plan)
    halves = [master.bfloat16() for master in masters]
    plan = zerofp4.CastPlan(weights, halves, starts)
    with pytest.raises(ValueError, match=r"master_pieces\(\)\[0\].master \(torch.bfloat16, elements"):
        FusedAdamW(masters).offer_amaxes(plan)


def test_a_parameter_that_left_its_master(device):
    weights, masters, starts = make(device)
    plan = zerofp4.CastPlan(weights, masters, starts)
    parameters = [master.view(-1) for master in masters]
    optimizer = FusedAdamW(parameters)
    optimizer.offer_amaxes(plan)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    parameters[1].data = parameters[1].data.clone()
    with pytest.raises(RuntimeError, match=r"\['params'\]\[1\] is not where the plan's master is"):
        optimizer.step()


def test_update_and_cast_in_a_cuda_graph(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs are captured on a GPU")
    plan, optimizer, weights, masters, _ = offered(device, capturable=True)
    expected = Expected(optimizer)
    gradients = [torch.randn_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    expected.step()
    optimizer.step()
    plan.step()
    plan.post()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
        plan.step()
        plan.post()
    for replay in range(3):
        for gradient in gradients:
            gradient.normal_()
        expected.step()
        graph.replay()
        torch.cuda.synchronize()
        expected.check(f"replay {replay}:")
        check(weights, masters)
        check_transposes(weights, masters)


def test_a_word_on_the_device_says_whether_there_is_a_gradient(device):
    """Without one a master and its state stay as they are, and its amaxes are left all the same."""
    plan, optimizer, weights, masters, starts = offered(device)
    others = [master.clone() for master in masters]
    plain = FusedAdamW(others, **OPTIONS)
    words = torch.zeros(len(masters), dtype=torch.float64, device=device)
    optimizer.offer_parts([(masters, plan)], dict(zip(masters, words.split(1), strict=True)))
    for step in range(3):
        present = [(i + step) % 2 == 0 for i in range(len(masters))]
        words.copy_(torch.tensor(present))
        for master, other, there in zip(masters, others, present, strict=True):
            master.grad = torch.full_like(master, step + 1.0)
            other.grad = master.grad.clone() if there else None
        optimizer.step()
        plain.step()
        plan.step()
        compare_with_the_plans_own(plan, weights, masters, starts)
        for i, (master, other) in enumerate(zip(masters, others, strict=True)):
            assert_bytes_equal(master, other, f"step {step}: master {i}")
    for master, other in zip(masters, others, strict=True):
        for key, value in plain.state[other].items():
            assert_bytes_equal(optimizer.state[master][key], value, key)
