"""p.grad that aliases flat memory: it has the bytes that autograd gives a model without such memory, and so
has what travels, whatever users, hooks, checkpoints, errors and threads do in between.
"""

import threading
import weakref

import pytest
import torch
from cases.gradient_places import Models, Square, Twice, back, inputs, made, memory_of
from helpers import assert_bytes_equal, collect_garbage
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerofp4.engine import buckets


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_not_there_again(device, set_to_none):
    """What an earlier step left is not sent."""
    models = made(nn.Sequential(Twice(), Twice()), device)
    for step in range(3):
        models.both(lambda model, step=step: back(model[:1] if step == 1 else model, device, step))
        models.check()
        models.both(lambda model: model.zero_grad(set_to_none))


def test_each_backward_pass_leaves_a_gradient_of_its_own(device, models):
    """After zero_grad(), so that what was reduced before is not taken for it."""
    back(models.placed, device)
    before = models.placed.weight.grad
    version = before._version
    models.placed.zero_grad()
    back(models.placed, device, 1)
    assert models.placed.weight.grad is not before and before._version == version


def test_two_optimizers_of_the_same_parameters(device, models):
    """As while a second one is built from the masters of the first."""
    second = Models(models.plain, models.placed, memory_of([models.placed.weight]))
    for step in range(2):
        models.back(step)
        models.check()
        second.check()


def test_memory_and_places_end_with_their_owner(device, given):
    plain, placed, memory = made(Twice(bias=False), device)
    second, alive = memory_of([placed.weight]), weakref.ref(memory.flat)
    del memory
    collect_garbage()
    models = Models(plain, placed, second)
    assert alive() is None
    models.back()
    assert given == [True]
    models.check()
    del second, models
    collect_garbage()
    for model in (plain, placed):
        model.zero_grad()
        back(model, device, 1)
    assert given == [True] and not placed.weight._post_accumulate_grad_hooks
    assert_bytes_equal(placed.weight.grad, plain.weight.grad, "weight")


def test_one_gradient_elsewhere_has_the_others_not_looked_at_one_by_one(device, monkeypatch):
    models = made(nn.Sequential(*(Twice() for _ in range(4))), device)
    models.back()
    for first, second, *_ in map(list, (models.plain.parameters(), models.placed.parameters())):
        first.grad, second.grad = None, second.grad.clone()
    monkeypatch.delattr(buckets, "is_sendable")
    models.check()


# Hooks


@pytest.mark.parametrize("scales", [True, False])
def test_a_hook_of_the_tensor_may_keep_its_gradient(device, models, given, scales):
    seen = []

    def hook(grad):
        seen.append(grad)
        return 2 * grad if scales else None

    for model in models[:2]:
        handle = model.weight.register_hook(hook)
        back(model, device)
        model.zero_grad()
        handle.remove()
        back(model, device, 1)
    assert_bytes_equal(*seen, "what the hook has kept")
    models.check()
    assert given == [True]


def test_a_hook_after_accumulation_sees_the_gradient(device, models):
    seen = []
    for model in models[:2]:
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(2):
            back(model, device, step)
    assert_bytes_equal(seen[2], seen[0], "first")
    assert_bytes_equal(seen[3], seen[1], "second")


# What users assign


@pytest.mark.parametrize("assigned", ["other memory", "its own"])
def test_what_a_user_assigned_is_added_to(device, models, given, assigned):
    for model in models[:2]:
        back(model, device)
        grad = model.weight.grad
        model.weight.grad = grad.clone() if assigned == "other memory" else grad.detach()
        back(model, device, 1)
    models.check()
    assert given == [True, False]


def test_what_a_user_assigned_is_copied_and_never_written(device, models):
    kept = torch.full((32, 32), 2.0, dtype=torch.bfloat16, device=device)
    back(models.placed, device)
    models.plain.weight.grad = models.placed.weight.grad = kept.t()
    models.check()
    assert models.are_there() == [False] and kept.eq(2).all()


def exchanged(first, second):
    first.grad, second.grad = second.grad, first.grad


def handed_on(first, second):
    second.grad, first.grad = first.grad, None


def shared(first, second):
    second.grad = first.grad


def turned(first, second):
    first.grad = first.grad.t()


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("change", [exchanged, handed_on, shared, turned])
def test_a_gradient_in_the_memory_of_another_is_refused(device, change, passes):
    """Also where a backward pass has added to it since, which moves nothing out of that memory."""
    models = made(nn.Sequential(Twice(False), Twice(False)), device)
    back(models.placed, device)
    change(*models.placed.parameters())
    for seed in range(passes):
        back(models.placed, device, seed=seed + 1)
    with pytest.raises(RuntimeError, match="exchanged, shared or transposed"):
        models.memory.check([p.grad for p in models.placed.parameters()], ["first", "second"])
    models.placed.zero_grad()
    models.back(seed=2)
    models.check()


def test_gradients_whose_memory_moved(device):
    """On a CPU share_memory_() of one takes the memory of all along."""
    models = made(Square(pairs=2), device)
    for model in models[:2]:
        back(model, device)
        next(model.parameters()).grad.share_memory_()
    models.check()


# Passes of other kinds


def test_a_gradient_of_another_dtype(device, given):
    models = made(Twice(bias=False), device, torch.float32)
    models.back()
    assert given == [False]
    assert_bytes_equal(models.placed.weight.grad, models.plain.weight.grad, "weight")


def test_autocast_in_the_backward_pass(device, models, given):
    for model in models[:2]:
        with torch.autocast(device.type, torch.bfloat16):
            back(model, device)
    models.check()
    assert given == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(device, models, given, reentrant):
    for model in models[:2]:
        for seed in range(2):
            y = checkpoint(model, inputs(device, seed), 2, use_reentrant=reentrant)
            y.float().square().mean().backward()
    models.check()
    assert given[:2] == [True, False] and not any(given[2:])


@pytest.mark.parametrize("outside", [1, 2])
def test_a_backward_pass_inside_of_another(device, models, outside):
    """A reentrant checkpoint accumulates while a gradient of the same weight is on its way outside of it."""
    for model in models[:2]:
        x = inputs(device)
        if outside == 2:
            x = model(x)
        x = checkpoint(model, x, 2, use_reentrant=True)
        model(x).float().square().mean().backward()
    models.check()
    models.both(nn.Module.zero_grad)
    models.back(1)
    models.check()
    assert models.are_there() == [True]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in between")


@pytest.mark.parametrize("keeps", [True, False])
def test_after_an_error_in_between(device, models, given, keeps):
    kept = []
    for model in models[:2]:
        loss = model(Fails.apply(model(inputs(device)))).float().square().mean()
        try:
            loss.backward()
        except ArithmeticError as error:
            kept += [error] * keeps
        del loss
        back(model, device, 1)
    models.check()
    assert models.are_there() == [True] and given == [True, True]


def test_threads(device, models):
    """Two gradients at a time: their sum does not depend on who comes first."""
    for _ in range(20):
        for model in models[:2]:
            model.zero_grad()
            threads = [threading.Thread(target=back, args=(model, device, seed)) for seed in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        models.check()
