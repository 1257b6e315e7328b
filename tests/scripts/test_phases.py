"""What train.py says of the time and the bytes of a step, and the phases of a step in its summary;
tests/distributed has those of several ranks.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import phases
import pytest
import torch
from cases.train import read_numbers, train_here
from phases import NAMES, StepProfile, by_phase, innermost, show
from progress import Progress

from zerofp4.distributed import PHASES, PREFIX, in_phase
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

# By the clock


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
    assert phases.described(torch.optim.SGD([torch.zeros(1)])) == {"bytes_sent": {}, "shared_bytes": 0}


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


# Under a profiler

ALONE = {"scan", "gradients", "norm", "update", "amaxes", "cast", "transpose", "other"}
"""What a step of one rank takes time for; it votes with nobody, and nothing is gathered."""


def annotation(name: str, begin: float, end: float, tid: int = 1) -> dict:
    return {"cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin, "tid": tid}


def launched(correlation: int, launch: float, ms: float, cat: str = "kernel") -> list[dict]:
    """Long after it was launched."""
    work = {
        "cat": cat,
        "name": "k",
        "ts": launch + 1e6,
        "dur": ms * 1e3,
        "args": {"correlation": correlation},
    }
    start = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 2.0, "tid": 9}
    return [work, start | {"args": {"correlation": correlation}}]


STEP = [
    annotation("Optimizer.step#ZeroFP4Optimizer.step", 1000.0, 9000.0),
    annotation(PREFIX + "vote", 1500.0, 2500.0),
    annotation(PREFIX + "amaxes", 3000.0, 6000.0),
    annotation(PREFIX + "update", 3000.0, 5000.0),
    annotation(PREFIX + "gradients", 4000.0, 5000.0),
    annotation("Optimizer.step#AdamW.step", 3100.0, 3900.0),
    annotation(PREFIX + "gradients", 100.0, 600.0, tid=2),
    {"cat": "cpu_op", "name": PREFIX + "cast", "ts": 0.0, "dur": 9000.0, "tid": 1},
    {"ph": "M", "name": "process_name"},
]


def test_the_innermost_range_has_the_time_of_the_host():
    found = by_phase(STEP[::-1], on_gpu=False)
    assert found == {"vote": 1.0, "gradients": 1.5, "update": 1.0, "amaxes": 1.0, "other": 4.0}
    assert list(found) == [name for name in NAMES if name in found]


def test_pieces_of_ranges_do_not_overlap():
    ranges = [phases.Range(*one) for one in ((0.0, 9.0, "a"), (0.0, 4.0, "b"), (4.0, 9.0, "c"))]
    assert innermost(ranges) == ranges[1:]
    assert innermost([]) == []


def test_work_of_a_gpu_belongs_to_where_it_was_launched():
    """However late it is done, on whatever stream; what is launched outside of a step is no part of it."""
    work = [
        *launched(1, 200.0, 8.0),
        *launched(2, 700.0, 100.0),
        *launched(3, 1200.0, 0.5),
        *launched(4, 4500.0, 2.0, "gpu_memcpy"),
        *launched(5, 5500.0, 0.25),
        *launched(6, 9500.0, 100.0),
        {"cat": "kernel", "name": "k", "ts": 0.0, "dur": 1.0, "args": {"correlation": 99}},
    ]
    found = by_phase([*work, *STEP], on_gpu=True)
    assert found == {"vote": 0.0, "gradients": 10.0, "update": 0.0, "amaxes": 0.25, "other": 0.5}
    assert by_phase(STEP, on_gpu=True) == {}


def test_a_range_is_there_only_under_a_profiler():
    def work(a, *, b):
        return a + b

    assert in_phase("cast", work) is work
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        assert in_phase("cast", work)(1, b=2) == 3
    assert [event.name for event in profile.events()] == [PREFIX + "cast"]
    assert in_phase("cast", work) is work


def an_optimizer() -> ZeroFP4Optimizer:
    return ZeroFP4Optimizer([torch.nn.Parameter(torch.ones(64))], FusedAdamW, lr=0.1)


@pytest.mark.parametrize(
    ("steps", "most", "done", "expected"),
    [
        (400, 3, 0, [4, 5, 6]),
        (12, 5, 2, [6, 7, 8]),
        (6, 3, 0, [4]),
        (4, 3, 0, []),
        (4, 3, 4, []),
        (400, 0, 0, []),
    ],
)
def test_which_steps_are_profiled(monkeypatch, steps, most, done, expected):
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: FakeProfile())
    with StepProfile(an_optimizer(), torch.device("cpu"), done, steps, most) as profile:
        assert [step for step in range(done + 1, steps + 1) if profile.begin(step)] == expected
    why = profile.of_step()["why_none"]
    assert why.startswith(
        "the run has ended" if expected else "there are fewer" if most else "--profile-steps"
    )


class FakeProfile:
    def start(self) -> None: ...

    def stop(self) -> None: ...


def test_a_run_that_ends_in_an_error_leaves_no_profiler_on():
    with (
        pytest.raises(ZeroDivisionError),
        StepProfile(an_optimizer(), torch.device("cpu"), 0, 9, 3) as profile,
    ):
        assert profile.begin(4)
        raise ZeroDivisionError
    assert not torch.autograd.profiler._is_profiler_enabled


FOUND = {
    "steps": 1,
    "busy": "gpu",
    "step_milliseconds": 2000.0,
    "optimizer_milliseconds": 250.0,
    "phases": {"update": {"milliseconds": 1234.5, "sent_bytes": 0}},
}


@pytest.mark.parametrize("with_rich", [True, False])
def test_what_people_read(monkeypatch, capsys, with_rich):
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    show(FOUND)
    said = capsys.readouterr().out
    assert "phases of a step of rank 0, in 1 step under a profiler: what the GPU's streams are busy" in said
    assert "phases overlap" in said
    assert "clip_grad_norm_ and step() took 250.0 ms, and with both passes 2,000.0 ms" in said
    assert ("│" in said) == with_rich
    assert "1,234.500" in next(line for line in said.splitlines() if "update" in line)
    show({"why_none": "--profile-steps is 0"})
    assert capsys.readouterr().out == "  no phases of a step: --profile-steps is 0\n"


@pytest.mark.heavy
@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw"])
def test_a_run_of_one_rank(tmp_path, optimizer):
    """It sends nothing; and the numbers of a run are those without a profiler."""
    runs = []
    for most in ("2", "0"):
        options = ["--steps", "7", "--optimizer", optimizer, "--overwrite", "--profile-steps", most]
        finished = train_here(tmp_path, *options)
        assert finished.status == 0, finished.output
        runs.append(read_numbers(tmp_path))
        summary = json.loads((tmp_path / "summary.json").read_text())["runs"]["nvfp4"]["phases_of_step"]
        if most == "2":
            found = summary
            assert PHASES["update"] in finished.output
        else:
            assert summary == {"why_none": "--profile-steps is 0"}
    assert runs[0] == runs[1]
    assert found["steps"] == 2 and found["busy"] == ("gpu" if torch.cuda.is_available() else "host")
    assert found["step_milliseconds"] > found["optimizer_milliseconds"] > 0
    busy = {phase for phase, row in found["phases"].items() if row["milliseconds"] > 0}
    # On a GPU little but phases is queued, an update that leaves amaxes behind has them all, nothing reads
    # columns of these weights, and FusedAdamW reads the gradients where they are.
    idle = {"other", "amaxes", "transpose"} | ({"gradients"} if optimizer == "fused_adamw" else set())
    assert busy >= ALONE - (idle if torch.cuda.is_available() else set())
    assert not any(row["sent_bytes"] for row in found["phases"].values())
