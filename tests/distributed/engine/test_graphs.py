"""Steps of several ranks in a CUDA graph: the bytes of eager ones. On the CPU what they capture is done."""

import math
from unittest import mock

import pytest
import torch
from cases.optim import assert_all_equal, keywords, make_parameters, set_gradients

from distributed.engine.peer_checks import all_bytes
from distributed.optim.cases import SPECIFICATIONS, as_if_captured
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.adamw import BucketUpdate
from zerofp4.optim.agreement import Agreement


class Run:
    """A model whose steps, from the third on, are those of a graph, or none. lr is a tensor."""

    def __init__(self, world, transport, inner=FusedAdamW, **options):
        self.world, self.on_gpu = world, world.device.type == "cuda"
        self.parameters = make_parameters(world.device, 0, SPECIFICATIONS)
        self.lr = torch.tensor(0.02, device=world.device)
        options = {"lr": self.lr, "weight_decay": 0.1, "bucket_mb": 0.003} | options
        if inner is FusedAdamW:
            options["capturable"] = True
        self.optimizer = ZeroFP4Optimizer(self.parameters, inner, **keywords(options, transport=transport))
        self.graph = None

    def gradients(self, step):
        """On one rank only, or none, of the last parameters."""
        generator = torch.Generator().manual_seed(1000 * step + self.world.rank)
        drawn = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in self.parameters]
        return [*drawn[:-2], drawn[-2] if self.world.rank == 0 else None, None]

    def eager(self, step):
        set_gradients(self.parameters, self.gradients(step))
        self.optimizer.step()

    def capture(self):
        """With the gradients' places of the last step."""
        if self.on_gpu:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.optimizer.step()

    def replay(self, step, bad=None):
        """bad: the parameter whose gradient has a NaN on the last rank."""
        for i, (p, gradient) in enumerate(zip(self.parameters, self.gradients(step), strict=True)):
            if gradient is not None:
                p.grad.copy_(gradient)
            if i == bad and self.world.rank == self.world.world_size - 1:
                p.grad.view(-1)[0] = math.nan
        if self.graph is None:
            with as_if_captured():
                self.optimizer.step()
        else:
            self.graph.replay()


def assert_equal(run, other, step):
    sides = [all_bytes(one.parameters, one.optimizer) for one in (run, other)]
    assert_all_equal(*sides, f"step {step}: tensor")


@on_ranks(2, 3, time_limit=60)
@pytest.mark.parametrize("transport", ["collective", "peer"])
def test_replays_are_steps(world, transport):
    """Also those that are skipped, with another lr, and eager steps behind them."""
    if transport == "peer" and world.device.type != "cuda":
        pytest.skip("GPUs share memory")
    captured, eager = Run(world, transport), Run(world, transport)
    for step in range(2):
        captured.eager(step)
        eager.eager(step)
    captured.capture()
    for step in range(2, 7):
        bad = 3 if step == 4 else None
        captured.lr.fill_(0.02 / step)
        eager.lr.fill_(0.02 / step)
        captured.replay(step, bad)
        if bad is None:
            eager.eager(step)
        skipped = int(step >= 4)
        assert (captured.optimizer.found_inf.item() != 0) == (bad is not None)
        assert captured.optimizer.skipped_steps == skipped
        if bad is not None:
            assert captured.optimizer.first_nonfinite() == "param_groups[0]['params'][3]"
        assert_equal(captured, eager, step)
    for step in (7, 8):
        captured.eager(step)
        eager.eager(step)
        assert captured.optimizer.first_nonfinite() is None
        assert_equal(captured, eager, step)


@on_ranks(2)
def test_what_ranks_found_is_told_until_the_first_replay(world):
    """To capture a step runs nothing of it."""
    run = Run(world, "collective")
    run.eager(0)
    set_gradients(run.parameters, run.gradients(1))
    if world.rank == 1:
        run.parameters[3].grad.view(-1)[0] = math.nan
    run.optimizer.step()
    run.capture()
    assert run.optimizer.first_nonfinite() == "param_groups[0]['params'][3]"
    run.replay(2)
    assert run.optimizer.first_nonfinite() is None


def closure():
    return None


def refuse(*_, **__):
    raise RuntimeError("not like this")


@on_ranks(2)
def test_what_cannot_be_captured(world):
    """Every rank says so, and the next step is as if nothing had been asked for."""
    run, plain = Run(world, "auto"), Run(world, "auto")
    in_sequence = Run(world, "auto", torch.optim.SGD)
    early, late = (Run(world, "auto", overlap=overlap) for overlap in ("backward", "forward"))
    for one in (run, plain, in_sequence, early, late):
        one.eager(0)
    set_gradients(run.parameters, run.gradients(1))
    with as_if_captured():
        with cannot("what a closure computes"):
            run.optimizer.step(closure)
        with cannot("clip_grad_norm_ of several ranks"):
            run.optimizer.clip_grad_norm_(1.0)
        with cannot("SGD updates all masters at once"):
            in_sequence.optimizer.step()
        with cannot("gradients travel before it"):
            early.optimizer.step()
        with cannot("weights travel behind it"):
            late.optimizer.step()
        new = Run(world, "auto")
        set_gradients(new.parameters, new.gradients(1))
        with pytest.raises(RuntimeError, match=r"the first step.*cannot be captured"):
            new.optimizer.step()
    late.optimizer.check()  # a gather that nobody waits for keeps its plan
    run.optimizer.clip_grad_norm_(1.0)
    with as_if_captured(), cannot("clip_grad_norm_ has reduced the gradients"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    plain.optimizer.zero_grad()
    run.eager(1)
    plain.eager(1)
    assert_equal(run, plain, 1)
    obstacle = mock.patch.object(BucketUpdate, "begin", refuse)
    with as_if_captured(), obstacle, mock.patch.object(Agreement, "begin") as together:
        with pytest.raises(RuntimeError, match="not like this"):
            run.optimizer.step()
    assert not together.called
    if run.on_gpu:  # the update of a clipped step reads other gradients; ranks that end here must not hang
        set_gradients(run.parameters, run.gradients(2))
        run.optimizer.clip_grad_norm_(1.0)
        run.optimizer.step()
        with pytest.raises(RuntimeError, match="gradient dtypes cannot be captured"):
            run.capture()


def cannot(reason):
    return pytest.raises(RuntimeError, match=f"cannot be captured: {reason}|{reason} cannot be captured")
