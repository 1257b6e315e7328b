"""The subcommands for one device."""

import argparse
from collections.abc import Callable

from benchmarks import host, layers, tensors, weights
from benchmarks.session import Session
from benchmarks.workloads import LISTS

OPERATIONS: dict[str, tuple[Callable[[Session, argparse.Namespace], None], tuple[str, ...]]] = {
    "local_step": (weights.local_step, LISTS),
    "local_step_blocks": (weights.local_step_blocks, LISTS),
    "transpose": (weights.transpose, LISTS),
    "adamw": (weights.adamw, ("llama3-8b", "2000-small")),
    "host": (host.host, ("llama3-8b",)),
    "quantize": (tensors.quantize, ("square",)),
    "dequantize": (tensors.dequantize, ("square",)),
    "swizzle": (tensors.swizzle, ("268mb-scales", "llama3-8b")),
    "mxfp8": (tensors.mxfp8, ("square",)),
    "means": (tensors.means, ("square",)),
    "grouped": (tensors.grouped, ("64-groups",)),
    "layers": (layers.layers, ("llama3-8b",)),
}
"""What runs, whose docstring is the help of the subcommand, and the workloads that it can run."""

SHOWN = tuple(name for name in OPERATIONS if name != "layers")
"""What `all` runs."""
