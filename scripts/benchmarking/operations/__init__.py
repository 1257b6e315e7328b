"""The subcommands of scripts/bench.py. To add one: a function(session, options) in a file here, and a line in
OPERATIONS; its byte rule goes to rules.py, its targets to targets.py. Not operations but what they share are
inputs.py, peers.py and outside.py.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from benchmarking.operations import (
    adamw,
    cast,
    dequantize,
    grouped,
    hadamard,
    host,
    layers,
    mxfp8,
    quantize,
    swizzle,
    transpose,
)
from benchmarking.session import Session
from benchmarking.workloads import LISTS


class Operation(NamedTuple):
    """run's docstring is the help of the subcommand; workloads are those that it can run; has_layouts: its
    weights have the scale buffers that --scale-layouts says.
    """

    run: Callable[[Session, argparse.Namespace], None]
    workloads: tuple[str, ...] = LISTS
    has_layouts: bool = True


OPERATIONS = {
    "local_step": Operation(cast.local_step),
    "amax": Operation(cast.amax),
    "scale": Operation(cast.scale),
    "cast": Operation(cast.cast),
    "transpose": Operation(transpose.transpose),
    "adamw": Operation(adamw.adamw, ("llama3-8b", "2000-small")),
    "host": Operation(host.host, ("llama3-8b",)),
    "quantize": Operation(quantize.quantize, ("square", "te-3011"), has_layouts=False),
    "dequantize": Operation(dequantize.dequantize, ("square",), has_layouts=False),
    "swizzle": Operation(swizzle.swizzle, ("268mb-scales", "llama3-8b"), has_layouts=False),
    "hadamard": Operation(hadamard.hadamard, ("square",), has_layouts=False),
    "mxfp8": Operation(mxfp8.mxfp8, ("square",), has_layouts=False),
    "grouped": Operation(grouped.grouped, ("64-groups",), has_layouts=False),
    "layers": Operation(layers.layers, ("llama3-8b",), has_layouts=False),
}

SHOWN = (
    "local_step",
    "transpose",
    "adamw",
    "host",
    "quantize",
    "dequantize",
    "swizzle",
    "mxfp8",
    "grouped",
)
"""What `all` runs: the rest are parts of these."""
