"""The subcommands of scripts/bench.py. To add one: a function(session, options) in a file here, and a line in
OPERATIONS; its byte rule goes to rules.py, its targets to targets.py.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from benchmarking.operations import adamw, cast, host, transpose
from benchmarking.session import Session
from benchmarking.workloads import NAMES


class Operation(NamedTuple):
    """run's docstring is the help of the subcommand; workloads are those that it can run."""

    run: Callable[[Session, argparse.Namespace], None]
    workloads: tuple[str, ...] = tuple(NAMES)


OPERATIONS = {
    "local_step": Operation(cast.local_step),
    "amax": Operation(cast.amax),
    "scale": Operation(cast.scale),
    "cast": Operation(cast.cast),
    "transpose": Operation(transpose.transpose),
    "adamw": Operation(adamw.adamw, ("llama3-8b", "2000-small")),
    "host": Operation(host.host, ("llama3-8b",)),
}

SHOWN = ("local_step", "transpose", "adamw", "host")
"""What `all` runs: the rest are parts of these."""
