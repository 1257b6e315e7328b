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
def test_a_step_is_skipped_and_the_next_one_goes_on(device, name, clip, first):
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


@pytest.mark.parametrize("turned", [False, True])
def test_replays_of_a_cuda_graph_skip_steps(device, turned):
    if device.type != "cuda":
        pytest.skip("CUDA graphs are captured on a GPU")
    parameters, optimizer = built(device, FusedAdamW, capturable=True, **DEFAULTS)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        set_gradients(parameters, make_gradients(parameters, 0))
        if turned:
            turn_gradients(parameters)
        optimizer.step()
        plain.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 5):
        for p, gradient in zip(parameters, make_gradients(parameters, step), strict=True):
            p.grad.copy_(gradient)
        bad = step % 2
        if bad:
            parameters[3].grad[0, 0] = math.nan
        else:
            plain.step()
        graph.replay()
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (bad, (step + 1) // 2)
        check(optimizer, plain, f"step {step}:")


def test_skipped_gradients_are_not_used_again(device):
    parameters, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    plain = Plain(parameters, torch.optim.SGD, lr=0.1)
    parameters[4].grad[0, 0] = math.nan
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.step()  # the NaN is still in p.grad
    assert optimizer.skipped_steps == 2
    parameters[4].grad[0, 0] = 1.0
    plain.step()
    optimizer.step()
    assert optimizer.skipped_steps == 2
    check(optimizer, plain)


def test_a_sum_of_squares_that_overflows_is_no_reason_to_skip(device):
    parameters, optimizer = built(device, torch.optim.SGD, seed=0, lr=0.1)
    for value in (3e38, -3e38):
        parameters[3].grad[0, 0] = value
        optimizer.step()
        assert optimizer.skipped_steps == 0


def first_word(gradients, rounded_to=None):
    return first_nonfinite(gradients, range(len(gradients), 0, -1), rounded_to)


@pytest.mark.parametrize("value", VALUES)
def test_the_first_of_a_list(device, value):
    """Of any dtype, wherever in the gradient; empty and missing ones hold nothing."""
    assert first_word([None, None]) is None
    assert first_word([None, torch.zeros(0, device=device)]) is None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for at in (0, 1, 1000, 4999):
            gradients = [
                None,
                *(torch.full((5000,), 6e4, dtype=d) for d in (torch.float32, dtype, dtype)),
                None,
            ]
            gradients = [g if g is None else g.to(device) for g in gradients]
            assert first_word(gradients).item() == 0
            for i in (3, 2):
                gradients[i][at] = value
                assert len(gradients) - first_word(gradients).item() == i


@pytest.mark.parametrize("turned", [None, 2, 30])
@pytest.mark.parametrize("bad", [(3,), (3, 20), (20, 39), ()])
def test_the_first_of_a_long_list(device, bad, turned):
    """turned: one that is looked at otherwise."""
    gradients = [torch.ones(24, 10, device=device) for _ in range(40)]
    for i in bad:
        gradients[i][2, 3] = float("nan")
    if turned is not None:
        gradients[turned] = gradients[turned].t()
    found = first_word(gradients)
    assert found.item() == (len(gradients) - min(bad) if bad else 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_that_is_infinite_once_it_is_rounded(device, sign):
    """Where a copy to that dtype is: on both sides of the value between the largest and infinity."""
    for dtype in (torch.bfloat16, torch.float16):
        step = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
        beyond = (1.5 * step - 0.5 * step.to(dtype).nextafter(torch.zeros((), dtype=dtype)).double()).float()
        for value in (beyond.nextafter(torch.zeros(())), beyond):
            gradient = torch.zeros(1000, device=device)
            gradient[77] = sign * value
            infinite = bool(gradient.to(dtype).isinf().any())
            assert infinite == (value == beyond).item()
            assert bool(first_word([gradient], dtype).item()) == infinite
            assert first_word([gradient]).item() == 0


def test_what_is_infinite_in_fp32(device):
    """A gradient of another dtype than those of weights becomes FP32 before anything is done with it."""
    gradients = [torch.ones(3, device=device), torch.tensor([1.0, 1e300], device=device, dtype=torch.float64)]
    assert first_word(gradients).item() == 1
    gradients[1][1] = 1e30
    assert first_word(gradients).item() == 0
