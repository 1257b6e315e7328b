"""A rank that raises or gets a signal in the middle of a stage, and what the others make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from early import waits_for

from distributed.processes import Finished, run_script
from distributed.scripts.fault_driver import CASES, SIZE, VICTIM

CAST = ("reducing the amaxes of a cast failed on rank", "gathering weights failed on rank")
FAILED = {
    "backward": ("agreeing on clip_grad_norm_() failed on rank",),
    "reduce": ("averaging gradients failed on rank {rank} of 3: ",),
    "norm": ("finding the norm of the gradients failed on rank",),
    "update": CAST,
    "cast": CAST,
    "gather": CAST,
    "save": ("writing checkpoint step-00000002 failed on rank",),
    "load": ("load_state_dict() failed on rank",),
    "host update": CAST,
    "host sum": (
        "averaging gradients failed on rank",
        "agreeing on clip_grad_norm_() failed on rank",  # what the rank had sent was enough for another
    ),
}
"""How the messages of the others begin, when a rank is gone."""

TOLD = {
    "reduce": ("CollectiveError", r"agreeing on step() failed on rank"),
    "update": ("RuntimeError", "another rank could not take part in the cast; no rank changed a"),
    "host update": ("RuntimeError", "another rank could not take part in the cast; no rank changed a"),
    "host sum": ("RuntimeError", "rank 1 found an error, and no rank takes this step"),
    "save": ("CheckpointError", "{checkpoint} cannot be written: CheckpointException ranks:dict_keys([1])"),
    "load": ("CheckpointError", "{checkpoint} cannot be loaded: rank 1: told to raise"),
}
"""What the others make of an error that a rank can still tell them, or in spite of which it goes on."""


def inject(folder: Path) -> tuple[Finished, Path]:
    program = ["-m", "distributed.scripts.fault_driver", str(folder)]
    return run_script(program, 1, "alone", time_limit=240.0), folder


@pytest.mark.nightly
@waits_for(inject)
@pytest.mark.parametrize(("stage", "kind"), CASES)
def test_the_others_raise_an_error_that_names_the_stage(early, stage, kind):
    """And what is half written is no checkpoint."""
    finished, folder = early(inject)
    assert finished.status == 0, finished.output
    found = json.loads((folder / "outcomes.json").read_text())[f"{stage}-{kind}"]
    others = {str(rank) for rank in range(SIZE)} - {str(VICTIM)}
    assert others <= found.keys(), f"a rank hangs: {found}"
    steps = folder / f"{stage}-{kind}" / "checkpoints"
    whole = sorted(path.parent.name for path in steps.glob("step-*/.metadata"))
    assert whole == [f"step-{n:08}" for n in ((1, 2) if stage == "load" else (1,))]
    if kind == "raise" and stage not in ("save", "load"):
        assert found[str(VICTIM)] == ["ValueError", "told to raise"]
    if kind == "interrupt":
        assert found[str(VICTIM)] == ["KeyboardInterrupt", ""]
    for rank in others:
        name, message = found[rank]
        if kind == "raise" and stage in TOLD:
            begin = TOLD[stage][1].format(checkpoint=steps / "step-00000002")
            assert name == TOLD[stage][0] and message.startswith(begin), found
            continue
        begin = tuple(text.format(rank=rank) for text in FAILED[stage])
        assert name == "CollectiveError" and message.startswith(begin), found
        # Of three ranks, not which one was first: this one may wait for the third, which has given up.
        assert re.findall(r"rank (\d)", message) == [rank] and "(a rank has died" in message
