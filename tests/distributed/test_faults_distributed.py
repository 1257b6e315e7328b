"""A rank that raises, exits, is killed or stopped in the middle of a stage: what the others make of it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from early import waits_for

from distributed.fault_driver import KINDS, SIZE, STAGES, victim
from distributed.processes import ROOT, Finished, run_script

FAILED = {
    "backward": "agreeing on clip_grad_norm_() failed on rank",
    "reduce": "averaging gradients failed on rank {rank} of 3: ",
    "norm": "finding the norm of the gradients failed on rank",
    "update": ("reducing the amaxes of a cast failed on rank", "gathering weights failed on rank"),
    "cast": ("reducing the amaxes of a cast failed on rank", "gathering weights failed on rank"),
    "gather": ("reducing the amaxes of a cast failed on rank", "gathering weights failed on rank"),
    "save": "writing checkpoint step-00000002 failed on rank",
    "publish": "writing checkpoint step-00000002 failed on rank",
    "load": "load_state_dict() failed on rank",
}
"""How the messages of the others begin."""

GOES_ON = {
    "reduce": ("CollectiveError", "agreeing on step() failed on rank"),
    "update": ("RuntimeError", "another rank could not take part in the cast; no rank changed a weight"),
}
"""Where a rank that raises takes its part in the stage all the same, and what the others make of it."""

TOLD = {
    ("save", "raise"): "step-00000002 cannot be written: CheckpointException ranks:dict_keys([1])",
    ("save", "exit"): "step-00000002 cannot be written: CheckpointException ranks:dict_keys([1])",
    ("publish", "raise"): "writing checkpoint step-00000002: ValueError: told to raise",
    ("load", "raise"): "step-00000002 cannot be loaded: rank 1: told to raise",
}
"""What an error becomes that a rank can still tell the others: all ranks raise it, in a CheckpointError."""


def inject(folder: Path) -> tuple[Finished, Path]:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), *filter(None, sys.path)])}
    program = ["-m", "distributed.fault_driver", str(folder)]
    return run_script(program, 1, "alone", time_limit=240.0, env=env), folder


pytestmark = waits_for(inject)


@pytest.fixture
def outcomes(early):
    finished, folder = early(inject)
    assert finished.status == 0, finished.output
    return folder, json.loads((folder / "outcomes.json").read_text())


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_others_raise_an_error_that_names_the_stage(outcomes, stage, kind):
    _, found = outcomes
    others = {str(rank) for rank in range(SIZE)} - {str(victim(stage))}
    found = found[f"{stage}-{kind}"]
    assert others <= found.keys(), f"a rank hangs: {found}"
    if kind == "raise" and (stage, kind) not in TOLD:
        assert found[str(victim(stage))] == ["ValueError", "told to raise"]
    for rank in others:
        error, message = found[rank]
        if (stage, kind) in TOLD:
            assert error == "CheckpointError" and TOLD[stage, kind] in message, found
        elif kind == "raise" and stage in GOES_ON:
            assert (error, GOES_ON[stage][1]) == (GOES_ON[stage][0], message[: len(GOES_ON[stage][1])]), found
        else:
            begin = FAILED[stage] if isinstance(FAILED[stage], tuple) else (FAILED[stage],)
            assert error == "CollectiveError", found
            assert message.startswith(tuple(text.format(rank=rank) for text in begin)), found
            # Of three ranks, not which one was first: this one may wait for the third, which has given up.
            assert re.findall(r"rank (\d)", message) == [rank] and "(a rank has died" in message, found


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_half_written_is_no_checkpoint(outcomes, monkeypatch, stage, kind):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from checkpoints import find_damage

    folder, _ = outcomes
    whole = sorted((folder / f"{stage}-{kind}" / "checkpoints").glob("step-*"))
    names = [path.name for path in whole]
    assert names == ["step-00000001", *(["step-00000002"] if stage == "load" else [])]
    assert [find_damage(path) for path in whole] == [None] * len(whole)
