"""A step that is left in the middle breaks the optimizer, until its masters are those of one step again."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.optim import (
    assert_all_equal,
    assert_weights_follow,
    make_parameters,
    set_gradients,
    take_step,
)

import zerofp4
from zerofp4.optim import AveragedMasters, Communication, FusedAdamW, ZeroFP4Optimizer, zero


def interrupt(*_) -> None:
    raise KeyboardInterrupt("ctrl-c")


def interrupt_between_optimizers(optimizer) -> None:
    """The first has updated its masters, the other has not."""
    optimizer.inners.all[1].register_step_pre_hook(interrupt)


def interrupt_between_buckets(optimizer) -> None:
    optimizer.inner._parts[1].run = interrupt


def two_classes(parameters) -> list[dict]:
    beside = {"params": parameters[1::2], "optimizer_class": torch.optim.SGD, "lr": 0.1}
    return [{"params": parameters[::2]}, beside]


BREAKS = {
    "classes": (two_classes, interrupt_between_optimizers),
    "buckets": (lambda parameters: parameters, interrupt_between_buckets),
}


def build(device, groups):
    parameters = make_parameters(device)
    options = {"lr": 0.1, "communication": Communication(bucket_mb=0.003)}
    return parameters, ZeroFP4Optimizer(groups(parameters), FusedAdamW, **options)


def masters_of(optimizer) -> list[torch.Tensor]:
    return [master.clone() for master in optimizer.gathered_masters()]


def undo(optimizer) -> None:
    for inner in optimizer.inners.all:
        inner._optimizer_step_pre_hooks.clear()
        for part in getattr(inner, "_parts", ()):
            vars(part).pop("run", None)


@pytest.mark.parametrize("how", BREAKS)
def test_an_interrupt_between_updates(device, how, tmp_path):
    groups, place = BREAKS[how]
    parameters, optimizer = build(device, groups)
    averages = AveragedMasters(optimizer)
    take_step(parameters, optimizer, 0)
    saved, before = copy.deepcopy(optimizer.state_dict()), masters_of(optimizer)
    place(optimizer)
    with pytest.raises(KeyboardInterrupt):
        take_step(parameters, optimizer, 1)
    after = masters_of(optimizer)
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert any(same) and not all(same)  # of two steps
    assert isinstance(optimizer.broken, RuntimeError)
    assert "step() was left in the middle (KeyboardInterrupt: ctrl-c)" in str(optimizer.broken)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.check, optimizer.step):
        with pytest.raises(RuntimeError, match=r"of no more use: step\(\) was left in the middle") as caught:
            call()
        assert caught.value.__cause__ is optimizer.broken
    model = torch.nn.ParameterList(parameters)
    for save in (
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda: dcp.save(dict(optimizer.state[parameters[0]]), checkpoint_id=tmp_path, no_dist=True),
        lambda: dict(zerofp4.master_state_dict(model, optimizer)),
        averages.update,
    ):
        with pytest.raises((RuntimeError, dcp.api.CheckpointException), match="masters may be of two steps"):
            save()
    with pytest.raises(ValueError, match="masters_from is of no more use"):
        ZeroFP4Optimizer(groups(parameters), FusedAdamW, masters_from=optimizer)
    assert_all_equal(masters_of(optimizer), after, "master")
    other, right = build(device, groups)
    right.load_state_dict(copy.deepcopy(saved))
    undo(optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.broken is None
    take_step(other, right, 1)
    take_step(parameters, optimizer, 1)
    assert_all_equal(masters_of(optimizer), masters_of(right), "master")
    in_order = [p for group in optimizer.param_groups for p in group["params"]]
    assert_weights_follow(in_order, masters_of(optimizer))


def test_a_state_dict_without_masters_mends_nothing(device):
    groups, place = BREAKS["buckets"]
    parameters, optimizer = build(device, groups)
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(p.shape)) for p in parameters], lr=0.1)
    set_gradients(plain.param_groups[0]["params"], [torch.ones(p.shape) for p in parameters])
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    place(optimizer)
    with pytest.raises(KeyboardInterrupt):
        take_step(parameters, optimizer, 0)
    with pytest.raises(ValueError, match=r"state_dict has no master of .*left in the middle"):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.broken is not None


@pytest.mark.parametrize("where", ["read_state_dict", "agree_on_save"])
def test_a_load_that_is_interrupted_before_it_changes_masters_changes_nothing(device, where, monkeypatch):
    models = [build(device, two_classes) for _ in range(2)]
    for parameters, one in models:
        take_step(parameters, one, 0)
        saved = copy.deepcopy(one.state_dict())
        take_step(parameters, one, 1)
        one.param_groups[0]["lr"] = 0.05
    optimizer, right = (one for _, one in models)
    with monkeypatch.context() as patched:
        patched.setattr(zero, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved)
    assert optimizer.broken is None
    for parameters, one in models:
        take_step(parameters, one, 2)
    assert_all_equal(masters_of(optimizer), masters_of(right), "master")
