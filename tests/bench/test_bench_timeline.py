"""scripts/bench.py step --timeline: what a picture of a step is made of."""

import subprocess
import sys

import pytest
import torch
from benchmarking import timeline
from benchmarking.session import ROOT
from early import waits_for

EVENTS = [
    {"cat": "cpu_op", "name": "aten::add", "ts": 5.0, "dur": 1.0},
    {
        "cat": "kernel",
        "name": "void adamw_update_kernel<>",
        "ts": 1500.0,
        "dur": 400.0,
        "args": {"stream": 7},
    },
    {
        "cat": "kernel",
        "name": "ncclDevKernel_SendRecv(x)",
        "ts": 1000.0,
        "dur": 900.0,
        "args": {"stream": 20},
    },
    {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2000.0, "dur": 10.0, "args": {"stream": 7}},
    {"cat": "kernel", "name": "elementwise", "ts": 2100.0, "args": {"stream": 7}},
    {"ph": "M", "name": "process_name"},
]


@pytest.mark.bench
def test_spans_of_a_trace():
    found = timeline.spans(EVENTS)
    assert [(span.stream, span.begin, span.ms) for span in found] == [
        (20, 0.0, 0.9),
        (7, 0.5, 0.4),
        (7, 1.0, 0.01),
        (7, 1.1, 0.0),
    ]
    phases = [span.phase for span in found]
    assert phases == ["gradients travel", "update", "copies to peers and within", "other"]
    assert timeline.spans([]) == []


@pytest.mark.bench
def test_every_kernel_of_a_step_has_a_phase_of_its_own():
    names = {
        "adamw_begin_kernel": "update",
        "average_kernel": "mean",
        "find_nonfinite_kernel": "NaN scan",
        "partial_amax_kernel": "amax",
        "fused_scale_kernel": "scale",
        "partial_cast_kernel": "cast",
        "transpose_kernel": "transpose",
        "barrier_kernel": "barriers",
        "ncclDevKernel_AllReduce_Max": "votes and amaxes travel",
        "ncclDevKernel_AllGather_RING": "codes travel",
    }
    assert {name: timeline.Span(name, 0, 0, 0).phase for name in names} == names


@pytest.mark.bench
def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = timeline.draw(timeline.spans(EVENTS), tmp_path / "step.png", "a step")
    assert path.read_bytes().startswith(b"\x89PNG")


def step(folder):
    command = [sys.executable, "scripts/bench.py", "step", "--scale", "64", "--repeats", "1", "--timeline"]
    arguments = [*command, "--output", str(folder)]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120), folder


@pytest.mark.bench
@pytest.mark.heavy
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@waits_for(step)
def test_of_a_gpu(early):
    pytest.importorskip("matplotlib")
    run, folder = early(step)
    assert run.returncode == 0, run.stderr
    assert (folder / "timeline_collective_1_ranks.png").read_bytes().startswith(b"\x89PNG")
