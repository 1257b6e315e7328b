"""scripts/faults.py: ranks that are killed, and those that are started."""

from __future__ import annotations

import os
from pathlib import Path

import faults
import pytest
from distributed.processes import ROOT, Finished, run_script
from early import waits_for


def inject(folder: Path) -> Finished:
    options = ["--kills", "2", "--kinds", "kill,raise", "--ranks", "2", "--out", str(folder)]
    program = [str(ROOT / "scripts" / "faults.py"), *options]
    return run_script(program, 1, "alone", time_limit=300.0, env={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.nightly
@waits_for(inject)
def test_killed_ranks_are_restarted_and_go_on_with_the_same_bytes(early):
    """Or that raise. scripts/faults.py --kills 200 does it for longer."""
    finished = early(inject)
    assert finished.status == 0, finished.output
    assert finished.output.startswith("2 faults (")
    assert "every run ended with the same bytes" in finished.output


@pytest.mark.parametrize(("ranks", "on_gpus"), [(1, True), (2, True), (3, False)])
def test_ranks_without_a_gpu_each_run_on_the_cpu(two_gpus, monkeypatch, tmp_path, capsys, ranks, on_gpus):
    """NCCL would refuse them; and it is said."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = {}

    def refuse(command, *, env, **_):
        seen.update(env)
        raise InterruptedError

    monkeypatch.setattr(faults.subprocess, "Popen", refuse)
    with pytest.raises(InterruptedError):
        faults.compare(faults.parse_options(["--ranks", str(ranks), "--out", str(tmp_path)]))
    assert seen.get("CUDA_VISIBLE_DEVICES") == (None if on_gpus else "")
    said = "" if on_gpus else f"{ranks} ranks and 2 GPUs: they run on the CPU\n"
    assert capsys.readouterr().out == said
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_kind_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        faults.parse_options(["--kinds", "kill,explode"])
    assert "explode is none of kill, stop, raise, exit" in capsys.readouterr().err
