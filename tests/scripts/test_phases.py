"""What train.py says of the time and the bytes of a step."""

from __future__ import annotations

from types import SimpleNamespace

import phases
import pytest
import torch
from progress import Progress


def test_the_mean_of_all_steps_but_the_first(monkeypatch):
    times = iter([0.0, 9.0, 9.5, 9.75, 10.0, 10.5, 10.75, 11.0, 20.0, 20.25, 20.75, 21.75])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(times))
    clock = phases.Phases(torch.device("cpu"))
    assert clock.of_step() == {}
    for step in range(3):
        for _ in range(4):
            clock.mark()
        clock.count()
        assert bool(clock.of_step()) == (step > 0)
    assert clock.of_step() == {"passes": 375.0, "clip_grad_norm_": 375.0, "step": 625.0}
    said = phases.describe(clock.of_step(), {"gradients": 4000, "weights": 1000})
    assert "forward and backward 375.0 ms" in said
    assert said.endswith("step 625.0 ms; others get from it 4,000 bytes of gradients, 1,000 bytes of weights")


def test_steps_under_a_profiler_are_left_out(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 3.0, 3.0, 7.0, 8.0, 9.0, 10.0, 10.5, 10.75, 11.0])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(times))
    clock = phases.Phases(torch.device("cpu"))
    told = []
    for left_out in (False, True, False):
        for _ in range(4):
            clock.mark()
        told.append(clock.count(left_out=left_out))
    assert told[1] == {"passes": 4000.0, "clip_grad_norm_": 1000.0, "step": 1000.0}
    assert clock.of_step() == told[2] == {"passes": 500.0, "clip_grad_norm_": 250.0, "step": 250.0}
    progress = SimpleNamespace(step=0, seconds=0.0, first_seconds=0.0, training_seconds=0.0, left_out=0)
    for step, (seconds, left_out) in enumerate([(9.0, False), (0.5, False), (8.0, True), (0.5, False)], 1):
        Progress.count(progress, step, seconds, 30.0, left_out)
    found = Progress.summary(progress, [], tokens=100)
    assert (found["steps"], found["first_step_seconds"], found["tokens_per_second"]) == (4, 9.0, 200.0)


def test_a_run_of_one_step_and_one_rank():
    assert phases.describe({}, {"gradients": 0, "weights": 0}) == "a step of rank 0: there was one only"
    assert phases.bytes_sent(torch.optim.SGD([torch.zeros(1)])) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_asked_for_its_own_time():
    clock = phases.Phases(torch.device("cuda"))
    for _ in range(2):
        for _ in range(3):
            clock.mark()
            torch.cuda._sleep(2_000_000)
        clock.mark()
        torch.cuda.synchronize()
        clock.count()
    assert all(milliseconds > 0.1 for milliseconds in clock.of_step().values())
