"""The calls that scripts/bench.py instructions counts: what it makes ncu run.

Every row of the operations below is called once, after a kernel of torch's that is a mark: the order of the
kernels that ncu saw says which row each belongs to.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarking.operations import OPERATIONS
from benchmarking.rules import Moved

WORKLOADS = {
    "local_step": "square",
    "transpose": "square",
    "adamw": "square",
    "quantize": "square",
    "dequantize": "square",
    "mxfp8": "square",
    "swizzle": "268mb-scales",
    "grouped": "64-groups",
}
SIZE, SCALE = 8192, 4
MARK = "spin_kernel"  # torch.cuda._sleep launches it


class Calls:
    """Stands in for an operation's Session: what that times is called here, once, and its elements noted."""

    def __init__(self, device: torch.device):
        self.device = device
        # Nothing is asked of it but whether to measure what a GPU has besides.
        self.clock = SimpleNamespace(is_cuda=False)
        self.rows: list[dict] = []

    def time(
        self,
        name: str,
        run: Callable[[], object],
        moved: Moved,
        *,
        before: Callable[[], object] | None = None,
    ) -> dict:
        """Call `run` a first time for all that a first call does besides, and again before ncu."""
        for call in (run, lambda: marked(run)):
            if before is not None:
                before()
            call()
        self.rows.append({"name": name, "elements": moved.elements, "bytes": moved.bytes})
        return self.rows[-1]

    def ratio(self, *_) -> None:
        """Nothing is timed."""

    def compare(self, *_) -> None:
        """Nor is anything here."""

    def say(self, line: str) -> None:
        print(line, flush=True)


def marked(run: Callable[[], object]) -> None:
    """Have ncu look at the mark and at what `run` launches."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def call_all(device: torch.device, size: int = SIZE, scale: int = SCALE) -> list[dict]:
    """Call every row; returns their names, elements and bytes in the order of the calls."""
    calls = Calls(device)
    for name, workload in WORKLOADS.items():
        options = argparse.Namespace(
            workload=[workload], size=size, scale=scale, scale_layouts=["compact"], peers=False
        )
        OPERATIONS[name].run(calls, options)
        gc.collect()  # plans and weights hold one another
    return calls.rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(call_all(torch.device("cuda"))))
