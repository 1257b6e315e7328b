"""A step that is left in the middle breaks the optimizer, until its masters are those of one step again."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal, assert_weights_follow, make_parameters, take_step

import zerofp4
from zerofp4.optim import AveragedMasters, Communication, FusedAdamW, ZeroFP4Optimizer


def build(device, between):
    parameters = make_parameters(device)
    beside = {"params": parameters[4:], "optimizer_class": torch.optim.SGD, "lr": 0.1}
    groups = [{"params": parameters[:4]}, beside] if between == "classes" else parameters
    options = {"lr": 0.1, "communication": Communication(bucket_mb=0.003)}
    return parameters, ZeroFP4Optimizer(groups, FusedAdamW, **options)


@pytest.mark.parametrize("between", ["classes", "buckets"])
def test_an_interrupt_between_updates(device, monkeypatch, tmp_path, between):
    parameters, optimizer = build(device, between)
    averages = AveragedMasters(optimizer)
    take_step(parameters, optimizer, 0)
    saved, before = copy.deepcopy(optimizer.state_dict()), optimizer.gathered_masters()
    with monkeypatch.context() as patched:
        interrupt = mock.Mock(side_effect=KeyboardInterrupt("ctrl-c"))
        first, *others = optimizer.inners.all
        patched.setattr(*((others[0], "step") if others else (first._parts[1], "run")), interrupt)
        with pytest.raises(KeyboardInterrupt):
            take_step(parameters, optimizer, 1)
    after = optimizer.gathered_masters()
    same = list(map(torch.equal, before, after))
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
        ZeroFP4Optimizer(parameters, FusedAdamW, masters_from=optimizer)
    assert_all_equal(optimizer.gathered_masters(), after, "master")
    other, right = build(device, between)
    right.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(saved)
    assert optimizer.broken is None
    take_step(other, right, 1)
    take_step(parameters, optimizer, 1)
    assert_all_equal(optimizer.gathered_masters(), right.gathered_masters(), "master")
    assert_weights_follow(parameters, optimizer.gathered_masters())
