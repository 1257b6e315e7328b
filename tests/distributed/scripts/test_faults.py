"""A rank that raises, exits, is killed or stopped in the middle of a stage: what the others make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import find_damage
from early import waits_for

from distributed.processes import Finished, run_script
from distributed.scripts.fault_driver import KINDS, SIZE, STAGES, victim

CAST = ("reducing the amaxes of a cast failed on rank", "gathering weights failed on rank")
FAILED = {
    "backward": ("agreeing on clip_grad_norm_() failed on rank",),
    "reduce": ("averaging gradients failed on rank {rank} of 3: ",),
    "norm": ("finding the norm of the gradients failed on rank",),
    "update": CAST,
    "cast": CAST,
    "gather": CAST,
    "save": ("writing checkpoint step-00000002 failed on rank",),
    "publish": ("writing checkpoint step-00000002 failed on rank",),
    "load": ("load_state_dict() failed on rank",),
}
"""How the messages of the others begin, when a rank is gone."""

WRITTEN = r".*step-00000002 cannot be written: CheckpointException ranks:dict_keys\(\[1\]\)"
PUBLISHED = ".*writing checkpoint step-00000002: ValueError: told to raise"
TOLD = {
    ("save", "raise"): ("CheckpointError", WRITTEN),
    ("save", "exit"): ("CheckpointError", WRITTEN),
    ("publish", "raise"): ("CheckpointError", PUBLISHED),
    ("load", "raise"): ("CheckpointError", ".*step-00000002 cannot be loaded: rank 1: told to raise"),
    ("reduce", "raise"): ("CollectiveError", r"agreeing on step\(\) failed on rank"),
    ("update", "raise"): ("RuntimeError", "another rank could not take part in the cast; no rank changed a"),
}
"""What the others make of an error that a rank can still tell them, or in spite of which it goes on."""


def inject(folder: Path) -> tuple[Finished, Path]:
    program = ["-m", "distributed.scripts.fault_driver", str(folder)]
    return run_script(program, 1, "alone", time_limit=240.0), folder


@pytest.mark.nightly
@waits_for(inject)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_others_raise_an_error_that_names_the_stage(early, stage, kind):
    """And what is half written is no checkpoint."""
    finished, folder = early(inject)
    assert finished.status == 0, finished.output
    found = json.loads((folder / "outcomes.json").read_text())[f"{stage}-{kind}"]
    failed = str(victim(stage))
    others = {str(rank) for rank in range(SIZE)} - {failed}
    assert others <= found.keys(), f"a rank hangs: {found}"
    told, message = TOLD.get((stage, kind), (None, ""))
    if kind == "raise" and told != "CheckpointError":
        assert found[failed] == ["ValueError", "told to raise"]
    for rank in others:
        if told is not None:
            assert found[rank][0] == told and re.match(message, found[rank][1], re.DOTALL), found
            continue
        begin = tuple(text.format(rank=rank) for text in FAILED[stage])
        assert found[rank][0] == "CollectiveError" and found[rank][1].startswith(begin), found
        # Of three ranks, not which one was first: this one may wait for the third, which has given up.
        assert re.findall(r"rank (\d)", found[rank][1]) == [rank] and "(a rank has died" in found[rank][1]

    whole = sorted((folder / f"{stage}-{kind}" / "checkpoints").glob("step-*"))
    steps = (1, 2) if stage == "load" else (1,)
    assert [(path.name, find_damage(path)) for path in whole] == [(f"step-{n:08}", None) for n in steps]
