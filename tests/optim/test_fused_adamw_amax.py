"""FusedAdamW leaves in a plan's reduced vector what the plan itself would compute from the masters."""

import math

import pytest
import torch
from cases.cast import ROWS, TILES, make, make_kinds
from cases.optim import (
    assert_weights_follow,
    built,
    take_step,
)
from distributed.optim.fused_cases import (
    OPTIONS,
    Alone,
    Expected,
    set_gradient,
    stages_of_plans,
)
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st

import zerofp4
from zerofp4 import FourOverSix
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


class Offered:
    """A plan, and the optimizer of its masters, which it was offered to."""

    def __init__(self, weights, masters, starts, parameters=None, adamw=OPTIONS, **options):
        self.weights, self.masters, self.starts, self.options = weights, masters, starts, options
        self.plan = zerofp4.CastPlan(weights, masters, starts, **options)
        self.optimizer = FusedAdamW(masters if parameters is None else parameters, **adamw)
        self.optimizer.offer_amaxes(self.plan)

    def step(self, expected=None, gradient=None) -> None:
        """Leaves all amaxes, whatever was there: the whole vector, header included, is that of a plan which
        takes them itself. expected, gradient: those of Expected.compare_steps().
        """
        self.plan.reduced.fill_(123)
        self.optimizer.step() if expected is None else expected.compare_steps(range(1), gradient)
        own = zerofp4.CastPlan(self.weights, self.masters, self.starts, **self.options)
        own.step()
        assert_bytes_equal(self.plan.reduced, own.reduced, "reduced vector")


@given(pieces=st.lists(shards(), min_size=1, max_size=4), grouped=st.booleans(), seed=st.integers(0, 99))
def test_amaxes_of_shards(device, pieces, grouped, seed):
    generator = torch.Generator().manual_seed(seed)
    weights, masters = [], []
    for shape, dtype, _, numel, offset, _ in pieces:
        weights.append(zerofp4.empty(shape, dtype=dtype, device=device, columnwise=False))
        # Beyond float16, too.
        values = torch.randn(offset + numel, generator=generator) * 10.0 ** (seed % 9 - 4)
        masters.append(values.to(device)[offset:])
    alike = len(weights) > 1 and weights[0].record.experts == weights[1].record.experts
    groups = {"amax_groups": [weights[:2]]} if grouped and alike else {}
    extra = torch.randn(3000, generator=generator).to(device)
    # The optimizer's tensors are other objects on the same memory.
    parameters = [extra, *(master.view(-1) for master in masters)]
    case = Offered(weights, masters, [start for _, _, start, *_ in pieces], parameters, **groups)
    expected = Expected(case.optimizer)
    dtypes = [torch.float32, *(dtype for *_, dtype in pieces)]

    def gradient(_, i, p):
        values = torch.randn(p.numel(), generator=generator).to(device)
        return None if dtypes[i] is None else values.to(dtypes[i])

    for _ in range(2):
        case.step(expected, gradient)


@pytest.mark.parametrize("choices", [[None], [FourOverSix()]], ids=["one scale", "four over six"])
@pytest.mark.parametrize("blocks", [[ROWS], [ROWS, TILES], [TILES]], ids=["rows", "both", "tiles"])
@pytest.mark.parametrize("state", ["full", "compact"])
def test_weights_whose_scales_travel(device, state, blocks, choices):
    """Their own amaxes and those of their groups, also of masters without a gradient."""
    shapes = [(34, 288), (32, 64), (2, 2), (130, 1000), (16, 128)]
    weights, masters, starts = make_kinds(device, shapes, blocks, choices)
    parameters = [master.view(shape) for master, shape in zip(masters, shapes, strict=True)]
    groups = {"amax_groups": [[weights[1], weights[4]]]}
    case = Offered(weights, masters, starts, parameters, {"lr": 0.1, "state": state}, **groups)
    for step in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = None if i == step else torch.randn_like(parameter)
        if step == 2:
            masters[3].view(-1)[7] = math.inf
        case.step()
        if step < 2:
            with stages_of_plans() as stages:
                case.plan.step()
            assert "begin_amax" not in stages


@pytest.mark.threads
def test_large_weights_on_many_threads(device):
    """Beside one whose scales travel, of which a rank owns a part between blocks."""
    shapes = (512, 1024), (300, 2872), (48, 128), (1024, 130)
    weights, masters, starts = make(device, shapes)
    weights.append(zerofp4.empty((40, 288), block=ROWS, device=device))
    masters.append(torch.randn(288 * 20 + 32, device=device))
    case = Offered(weights, masters, [*starts, 5 * 288 + 16])
    for i, master in enumerate(masters):
        set_gradient(master, torch.randn_like(master).to(torch.bfloat16 if i % 2 else torch.float32))
    for _ in range(2):
        case.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38, 65519.0, 65520.0, 1e-45, 6e-8, 0.0])
def test_amaxes_of_values_at_the_edges(device, dtype, value):
    weights = [zerofp4.empty((32, 160), dtype=dtype, device=device)]
    master = torch.zeros(32 * 160, device=device)
    master[17 * 160 + 155] = value
    case = Offered(weights, [master], [0], adamw={"lr": 0.0, "weight_decay": 0.0})
    for gradient in (None, torch.zeros_like(master)):
        master.grad = gradient
        case.step()


def test_a_parameter_that_left_its_master(device):
    weights, masters, starts = make(device)
    parameters = [master.view(-1) for master in masters]
    case = Offered(weights, masters, starts, parameters)
    case.optimizer.step()
    parameters[1].data = parameters[1].data.clone()
    with pytest.raises(RuntimeError, match=r"\['params'\]\[1\] is not where the plan's master is"):
        case.optimizer.step()


def test_offers_that_are_refused(device):
    weights, (first, second), starts = make(device)
    plan = zerofp4.CastPlan(weights, [first, second], starts)
    stack = torch.randn(3 * 18 * 34 - 7, device=device)  # begins in the first of 3 experts
    of_experts = zerofp4.CastPlan([zerofp4.empty((3, 18, 34), device=device)], [stack], [7])
    for refused, parameters, which in (
        (plan, [first], 1),
        (plan, [first, second[:255]], 1),
        (of_experts, [stack[:605]], 1),
        (of_experts, [stack[:-1]], 0),
    ):
        with pytest.raises(ValueError, match=f"piece {which} of the plan's masters is not one of the opt"):
            FusedAdamW(parameters).offer_amaxes(refused)


def test_a_word_on_the_device_says_whether_there_is_a_gradient(device):
    """Without one a master and its state stay as they are, and its amaxes are left all the same."""
    case = Offered(*make(device))
    words = torch.zeros(2, dtype=torch.float64, device=device)
    present = dict(zip(case.masters, words.split(1), strict=True))
    case.optimizer.offer_parts([(case.masters, case.plan)], present)
    expected = Expected(case.optimizer)
    for step in range(3):
        without, other = case.masters if step % 2 else case.masters[::-1]
        words.copy_(torch.tensor([1 - step % 2, step % 2]))
        set_gradient(without, None)
        set_gradient(other, torch.randn_like(other))
        expected.step()
        set_gradient(without, torch.full_like(without, math.nan))
        case.step()
    expected.check()


# Of ZeroFP4Optimizer


class Multiplied(FusedAdamW):
    """Writes to its masters after it has left their amaxes."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for master in self.param_groups[0]["params"]:
            master.mul_(3)
        return loss


@pytest.mark.parametrize(("optimizer_class", "passes"), [(FusedAdamW, 0), (Alone, 3), (Multiplied, 3)])
def test_amaxes_are_taken_once(device, optimizer_class, passes):
    """By the update, unless it keeps them to itself or masters were written after it."""
    parameters, optimizer = built(device, optimizer_class, lr=0.1)
    with stages_of_plans() as stages:
        for step in range(3):
            take_step(parameters, optimizer, step)
            assert_weights_follow(parameters, optimizer.gathered_masters())
    assert stages.count("begin_amax") == passes
    assert optimizer.found_inf.item() == 0
