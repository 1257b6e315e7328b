"""GroupedLinear with all groups in one launch, as it runs on Hopper, beside one after another. On the CPU,
where torch's grouped_mm is a loop, the same code runs when it is made to.
"""

import pytest
import torch
from cases.gemm import relative_error
from cases.layers import step
from helpers import assert_all_equal, assert_bytes_equal, needs_gpu, nothing_waits
from tensor_helpers import values

from zerofp4.nn import GroupedLinear, MXFP8Recipe, NVFP4Recipe, autocast, grouped_linear
from zerofp4.nn.grouped_linear import why_one_by_one

NEAREST = NVFP4Recipe(stochastic_rounding=False)
SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [9, 9, 9, 9]]
TOLERANCE = 6e-3  # of two roundings to bfloat16, one of them of the weight's values


@pytest.fixture
def at_once(monkeypatch, multiplied_at_once):
    """The calls."""
    calls = []
    call = GroupedLinear._at_once
    monkeypatch.setattr(GroupedLinear, "_at_once", lambda *args: calls.append(args) or call(*args))
    return calls


def experts(device, **options):
    torch.manual_seed(0)
    return GroupedLinear(4, 64, 48, device=device, dtype=torch.bfloat16, **options)


def train(module, splits, device, recipe=NEAREST):
    return step(module, module, recipe, values(36, 64, device=device), splits)


def one_by_one(monkeypatch, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(grouped_linear, "why_one_by_one", lambda *_: "for a test")
        return train(*arguments)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("hadamard", [True, False])
def test_all_groups_at_once(monkeypatch, device, at_once, splits, bias, primary, hadamard):
    module = experts(device, bias=bias, primary_weights=primary)
    recipe = NVFP4Recipe(stochastic_rounding=False, hadamard=hadamard)
    expected = one_by_one(monkeypatch, module, splits, device, recipe)
    assert not at_once
    actual = train(module, splits, device, recipe)
    assert len(at_once) == 1
    for index, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert relative_error(mine, other.cpu().double()) <= TOLERANCE, f"result {index}"


def test_splits_anywhere_give_the_same_bytes(device, at_once):
    module = experts(device)
    results = []
    for splits in ([16, 0, 17, 3], torch.tensor([16, 0, 17, 3]), torch.tensor([16, 0, 17, 3], device=device)):
        results.append(train(module, splits, device))
    for others in results[1:]:
        assert_all_equal(others, results[0])


def test_accumulation_into_main_grad(device, at_once):
    module = experts(device, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.ones(4, 48, 64, device=device)
    expected = train(experts(device), [16, 0, 17, 3], device)[2]
    module.zero_grad()
    x = values(36, 64, device=device).requires_grad_()
    with autocast(NEAREST):
        module(x, [16, 0, 17, 3]).backward(values(36, 48, device=device, seed=1))
    assert module.weight.grad is None
    assert_bytes_equal(module.weight.main_grad, expected.float() + 1, "main_grad")


@needs_gpu
def test_nothing_waits_for_the_device(at_once):
    device = torch.device("cuda", 0)
    module, splits = experts(device, bias=False), torch.tensor([16, 0, 17, 3], device=device)
    train(module, splits, device, NVFP4Recipe())
    x, grad = values(36, 64, device=device).requires_grad_(), values(36, 48, device=device)
    torch.cuda.synchronize()
    with nothing_waits():
        with autocast(NVFP4Recipe()):
            y = module(x, splits)
        y.backward(grad)


@needs_gpu
def test_wrong_splits_on_a_gpu_give_nan(at_once):
    device = torch.device("cuda", 0)
    module = experts(device, bias=False)
    results = train(module, torch.tensor([16, 0, 17, 4], device=device), device)
    assert all(result.isnan().all() for result in results)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (MXFP8Recipe(), "MXFP8Recipe has no groups"),
        (NVFP4Recipe(backward="dequantized"), "no dequantized backward pass"),
    ],
)
def test_what_goes_one_by_one(device, recipe, reason):
    x = values(36, 64, device=device)
    with autocast(recipe):
        assert reason in why_one_by_one(x, (48, 64), recipe)
    assert why_one_by_one(x[:0], (48, 64), NEAREST) == "there are no tokens"
