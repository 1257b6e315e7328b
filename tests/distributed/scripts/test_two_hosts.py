"""two_hosts.py: the bytes that cross the link between two hosts made of namespaces."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.session import RESULTS
from benchmarks.workloads import weight_shapes
from distributed import two_hosts

COMMAND = [sys.executable, *two_hosts.MODULE]
TESTS = Path(two_hosts.__file__).parents[1]


FEW_BITS = [f"--way {wire}" for wire in two_hosts.FEW_BITS]


@pytest.fixture
def needs_namespaces():
    try:
        with two_hosts.two_hosts(megabits=400):
            pass
    except two_hosts.NoNamespaces as error:
        pytest.skip(f"no network namespaces: {error}")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_a_step_of_one_host_sends_what_describe_says():
    result = json.loads((RESULTS / "step_2_ranks_cuda.json").read_text())
    said = {row["name"]: row.get("megabytes") for row in result["rows"]}
    for phase, (here, across) in two_hosts.sent_of(weight_shapes(1), 2, "collective", of_host=2).items():
        # Of amaxes each bucket has a header.
        assert here / 1e6 == pytest.approx(said[f"sent_{phase}/2xcuda"], rel=1e-4) and across == 0


def test_what_the_model_has_cross_the_link():
    """Of 64 x 64 elements in 16 tiles, four ranks on two hosts own 1,024 each."""
    rings = {"amaxes": 2 * 2 * 16 * 3 / 4, "weights": 2048 * 3 / 4}
    model = {way: two_hosts.model_bytes(way, [(64, 64)], 2) for way in two_hosts.WAYS}
    assert model == {
        "collective": rings | {"gradients": 2 * 2 * 2 * 1024},  # bf16 rows of two ranks for two owners
        "reduce_scatter": rings | {"gradients": 2 * 8192 * 3 / 4},  # as gloo's all-reduce
        # Means of the two slices that each rank has of the other host's owners.
        "bf16": rings | {"gradients": 2 * 1024 * 2},
        "mxfp8": rings | {"gradients": 2 * (1024 + 32)},
        "nvfp4": rings | {"gradients": 2 * (512 + 64 + 2)},
    }


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["--way collective --ranks 3", "--way reduce_scatter", *FEW_BITS])
def test_the_bytes_that_cross_are_the_models(needs_namespaces, options):
    """The hosts have names of their own, so that ranks reduce-scatter by default."""
    command = [*COMMAND, *options.split()]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "sent by the first host" in run.stdout and "\nwithin 3% of the model" in run.stdout
    assert "zerofp4-" not in namespaces()


@pytest.mark.nightly
def test_a_run_that_is_ended_leaves_no_namespace(needs_namespaces):
    process = subprocess.Popen(COMMAND, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    name = f"zerofp4-{process.pid}-1"
    try:
        deadline = time.monotonic() + 60
        while name not in namespaces() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert name in namespaces()
        time.sleep(2)  # until ranks run in both
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert f"zerofp4-{process.pid}" not in namespaces()
