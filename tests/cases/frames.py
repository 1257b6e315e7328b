"""The functions in Python that a call runs."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

import zerofp4

PACKAGE = str(Path(zerofp4.__file__).parent)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def frames(run, folder: str = PACKAGE) -> Counter:
    """The functions of this package, or of another folder, that run() calls, in this thread."""
    found = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found[f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
