"""Steps of several ranks in a CUDA graph: refused by every rank, before anything is queued."""

from unittest import mock

import pytest
import torch
from cases.optim import assert_all_equal, keywords, make_parameters, set_gradients

from distributed.engine.peer_checks import all_bytes
from distributed.optim.cases import SPECIFICATIONS, gradients_of
from distributed.run import on_ranks
from zerofp4.distributed import collectives
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer, zero


@on_ranks(2)
@pytest.mark.parametrize("overlap", [None, "backward", "forward"])
def test_a_step_of_several_ranks_is_not_captured(world, overlap):
    """The next step is as if nothing had been asked for."""
    models = []
    for _ in range(2):
        parameters = make_parameters(world.device, 0, SPECIFICATIONS)
        options = keywords(lr=0.02, overlap=overlap, bucket_mb=0.003)
        models.append((parameters, ZeroFP4Optimizer(parameters, FusedAdamW, capturable=True, **options)))
    for step in range(2):
        for parameters, optimizer in models:
            set_gradients(parameters, gradients_of(world, parameters, step))
            if step and optimizer is models[0][1]:
                refused(optimizer)
            optimizer.step()
        assert_all_equal(*(all_bytes(*model) for model in models), f"step {step}")
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            models[0][0][3].detach().add(1)  # torch warns of an empty graph
            with pytest.raises(RuntimeError, match="vote of the ranks"):
                models[0][1].step()


def refused(optimizer):
    calls = {"step": optimizer.step, "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0)}
    with mock.patch.object(zero, "is_capturing", lambda device: True):
        with mock.patch.object(collectives, "dist") as collective:
            for name, call in calls.items():
                found = rf"{name}\(\) of 2 ranks cannot be captured in a CUDA graph: each step"
                with pytest.raises(RuntimeError, match=found):
                    call()
            assert not collective.mock_calls
