"""What ranks of a ZeroFP4Optimizer tell each other before a step, and what all do about it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, make_gradients, set_gradients

from distributed.cases import raised_by, raised_everywhere
from distributed.optim.cases import check_weights, model_bytes, parameters_of, raise_in_turn
from distributed.run import on_ranks
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer


def everything(parameters, optimizer):
    """Copies of all that a step changes, but for found_inf."""
    tensors = [*optimizer.gathered_masters(), *model_bytes(parameters)]
    for _, state in sorted(optimizer.inner.state_dict()["state"].items()):
        tensors += [state[key] for key in sorted(state)]
    return [tensor.clone() for tensor in tensors]


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["AdamW", "FusedAdamW"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_nonfinite_gradient_of_one_rank_skips_the_step_of_all(world, name, clip):
    """Also where another rank's infinity would make up for it, and where the parameter is another rank's."""
    parameters = parameters_of(world)
    optimizer_class = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}[name]
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1)
    last = world.world_size - 1
    skipped = 0
    for step, bad in enumerate([{}, {last: 3}, {0: 4}, {0: 7, last: 1}, {}]):
        set_gradients(parameters, make_gradients(parameters, 10 * world.rank + step))
        if world.rank in bad:
            parameters[bad[world.rank]].grad.view(-1)[-1] = math.nan if step == 1 else math.inf
        before = everything(parameters, optimizer)
        if clip:
            assert optimizer.clip_grad_norm_(1.0).isfinite().item() == (not bad)
        optimizer.step()
        skipped += bool(bad)
        assert (optimizer.skipped_steps, optimizer.found_inf.item()) == (skipped, bool(bad))
        first = optimizer.first_nonfinite()
        assert first == (f"param_groups[0]['params'][{min(bad.values())}]" if bad else None)
        if bad:
            assert_all_equal(everything(parameters, optimizer), before, "tensor")
        else:
            check_weights(parameters, optimizer)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32, None])
def test_a_gradient_that_the_wire_makes_infinite(world, wire):
    """In a world of any size: those of one rank alone are found where they were packed."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(
        parameters, torch.optim.SGD, lr=0.1, communication=Communication(gradient_wire=wire)
    )
    large = {torch.bfloat16: 3.4e38, torch.float16: -65520.0}.get(wire, 3.4e38)
    below = {torch.bfloat16: 3.3e38, torch.float16: -65519.0}.get(wire, 3.3e38)
    bad = wire in (torch.bfloat16, torch.float16)
    for value in (below, large):
        set_gradients(parameters, make_gradients(parameters, 0))
        if world.rank == 0:
            assert parameters[3].dtype == torch.float32
            parameters[3].grad.view(-1)[-1] = value
        before = everything(parameters, optimizer)
        optimizer.step()
        found = bad and value == large
        assert optimizer.skipped_steps == found
        assert optimizer.first_nonfinite() == ("param_groups[0]['params'][3]" if found else None)
        if found:
            assert_all_equal(everything(parameters, optimizer), before, "tensor")
    assert all(master.isfinite().all() for master in optimizer.gathered_masters())


@on_ranks(2, time_limit=30)
def test_raise_is_raised_by_all(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, on_nonfinite="raise")
    set_gradients(parameters, make_gradients(parameters, 0))
    if world.rank == 1:
        parameters[2].grad[0, 0] = math.nan
    before = everything(parameters, optimizer)
    for call in (
        optimizer.step,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.step(lambda: optimizer.clip_grad_norm_(1.0)),
    ):
        message = raised_everywhere(world, FloatingPointError, call)
        assert message.startswith("the gradient of param_groups[0]['params'][2] holds a NaN or Inf on some")
    assert_all_equal(everything(parameters, optimizer), before, "tensor")
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2)
def test_a_sum_that_overflows_is_left_to_the_cast(world):
    """Finite on each rank, infinite together: the masters become infinite, their weights stay."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=0.1)
    set_gradients(parameters, make_gradients(parameters, 0))
    parameters[0].grad[3, 5] = 3e38
    codes = parameters[0].rowwise_data.clone()
    optimizer.step()
    assert optimizer.skipped_steps == 0 and optimizer.first_nonfinite() is None
    assert optimizer.found_inf.item() == 1 and torch.equal(parameters[0].rowwise_data, codes)


@on_ranks(2, 3, time_limit=30)
def test_options_that_differ_are_named(world):
    parameters = parameters_of(world)
    bad = world.rank == world.world_size - 1
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    optimizer = ZeroFP4Optimizer(groups, lr=0.1, weight_decay=0.0)
    set_gradients(parameters, make_gradients(parameters, 0))
    group = optimizer.param_groups[1]
    before = everything(parameters, optimizer)
    for name, good, other, message in [
        (
            "lr",
            0.1,
            0.2,
            "param_groups[1]['lr'] must be the same on every rank, but is 0.1 on rank 0 and 0.2 on ",
        ),
        ("betas", (0.9, 0.999), (0.9, 0.99), "but is (0.9, 0.999) on rank 0 and (0.9, 0.99) on rank"),
        ("mine", 1, None, "param_groups: rank 0 has"),
    ]:
        group[name] = other if bad else good
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            assert message in raised_everywhere(world, RuntimeError, call)
        group[name] = good
    assert_all_equal(everything(parameters, optimizer), before, "tensor")
    group["weight_decay"] = 0 if bad else 0.0  # the same number
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, 3, time_limit=30)
def test_tensor_options_that_differ_are_named(world):
    parameters = parameters_of(world)
    last = world.world_size - 1
    bad = world.rank == last
    tensor = lambda value: torch.tensor(value, device=world.device)  # noqa: E731
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": tensor(0.5)}]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, lr=tensor(0.25))
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    before = everything(parameters, optimizer)
    first, second = optimizer.param_groups
    for group, others, here, there in [
        (first, tensor(0.125), "a tensor of 0.25", "a tensor of 0.125"),
        (second, tensor(0.25), "a tensor of 0.5", "a tensor of 0.25"),
        (first, 0.25, "a tensor of 0.25", "0.25"),
        (second, tensor(math.nan), "a tensor of 0.5", "a tensor of nan"),
    ]:
        good = group["lr"]
        group["lr"] = others if bad else good
        place = f"param_groups[{0 if group is first else 1}]['lr']"
        message = f"{place} must be the same on every rank, but is {here} on rank 0 and {there} on rank "
        steps = [] if there == "a tensor of nan" else [optimizer.step]  # which looks at lr itself
        for call in (*steps, lambda: optimizer.clip_grad_norm_(1.0)):
            assert message in raised_everywhere(world, RuntimeError, raise_in_turn, optimizer, call)
        group["lr"] = good
    if bad:
        first["lr"], second["lr"] = second["lr"], first["lr"]
    raised = raised_everywhere(world, RuntimeError, raise_in_turn, optimizer, optimizer.step)
    assert "['lr'] must be the same" in raised
    if bad:
        first["lr"], second["lr"] = second["lr"], first["lr"]
    assert_all_equal(everything(parameters, optimizer), before, "tensor")
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2)
def test_a_rank_without_gradients_may_have_dropped_them(world):
    """Then it has none of another batch, and counts as zeros."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1)
    optimizer.zero_grad()
    set_gradients(parameters, make_gradients(parameters, world.rank))
    if world.rank == 1:
        optimizer.zero_grad()
    optimizer.step()
    check_weights(parameters, optimizer)


@on_ranks(2, time_limit=30)
def test_ranks_out_of_step(world):
    """States of different steps do not load; a rank that lost count is found at the next vote."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    states = []
    for step in range(3):
        states.append(copy.deepcopy(optimizer.state_dict()))
        set_gradients(parameters, make_gradients(parameters, step))
        optimizer.step()
    before = everything(parameters, optimizer)
    message = raised_everywhere(world, ValueError, lambda: optimizer.load_state_dict(states[2 - world.rank]))
    assert message.startswith("state_dict mixes 2 saves") and "step 2" in message and "step 1" in message
    assert_all_equal(everything(parameters, optimizer), before, "tensor")

    def fail(*_):
        raise RuntimeError("after the update")

    optimizer.load_state_dict(states[2])
    if world.rank == 1:
        optimizer.register_step_post_hook(fail)  # of no consequence: the step is done
        with pytest.raises(RuntimeError, match="after the update"):
            optimizer.step()
    else:
        optimizer.step()
    optimizer._optimizer_step_post_hooks.clear()
    optimizer.step()
    optimizer._saved.steps += world.rank
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        message = raised_everywhere(world, RuntimeError, call)
        assert message.startswith("the ranks are out of step: some have taken 4 steps and others 5")


@on_ranks(2, time_limit=30)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_closure_reaches_the_others(world, error):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    before = everything(parameters, optimizer)

    def closure():
        if world.rank == 1:
            raise error

    raised = raised_by(lambda: optimizer.step(closure))
    assert isinstance(raised, error if world.rank == 1 else RuntimeError), repr(raised)
    assert world.rank == 1 or "rank 1 found an error, and no rank takes this step" in str(raised)
    assert_all_equal(everything(parameters, optimizer), before, "tensor")
    optimizer.step(lambda: None)
    dist.barrier()


@on_ranks(2)
def test_a_step_is_one_vote(world):
    """One small reduction that the host reads, besides those of gradients, norms and amaxes."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters)
    words = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kw: (words.append(tensor.dtype), reduce(tensor, *args, **kw))[1]
    try:
        set_gradients(parameters, make_gradients(parameters, 0))
        optimizer.step()
        assert words == [torch.float64, torch.float32]  # the vote, the amaxes
        words.clear()
        optimizer.clip_grad_norm_(1.0)
        assert words == [torch.float64, torch.int64]  # the vote, the norm
    finally:
        dist.all_reduce = reduce


@on_ranks(1, 2)
@pytest.mark.parametrize("cls", [FusedAdamW, torch.optim.SGD])
def test_a_found_inf_that_a_user_sets_skips_the_step_on_every_rank(world, cls):
    """As a GradScaler sets it, on one rank: it is the user's, and stays where it is."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, cls, lr=0.1)
    before = [*model_bytes(parameters), *optimizer.gathered_masters()]
    before = [tensor.clone() for tensor in before]
    for step, value in enumerate((1.0, 0.0)):
        set_gradients(parameters, make_gradients(parameters, world.rank))
        given = torch.tensor([value], device=world.device)
        if world.rank == world.world_size - 1:
            optimizer.inner.found_inf = given
        optimizer.step()
        if world.rank == world.world_size - 1:
            assert optimizer.inner.found_inf is given
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (value, 1)
        name = optimizer.first_nonfinite()
        assert name is None if step else "which was given a found_inf" in name
        if value:
            now = [*model_bytes(parameters), *optimizer.gathered_masters()]
            assert_all_equal(now, before, "tensor")
    check_weights(parameters, optimizer)
