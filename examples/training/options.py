"""The options of the program, and which of them exclude each other."""

import argparse
import math
from pathlib import Path

import torch

import examples.training
from examples.training.model import PRESETS
from examples.training.report import KINDS
from zerofp4.optim import FusedAdamW

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "fused_adamw": (FusedAdamW, {}),
    "compact_adamw": (FusedAdamW, {"state": "compact"}),
}
"""Class and arguments."""


def at_least(smallest: float, kind: type = int):
    """A type for argparse: finite numbers from `smallest` on."""

    def convert(value: str) -> float:
        if not smallest <= kind(value) < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {smallest} and finite, got {value}")
        return kind(value)

    convert.__name__ = kind.__name__  # argparse names it if the value is no number
    return convert


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Ends the program if options exclude each other."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.training",
        description=examples.training.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="1m", help="model, named by its parameters (default: 1m)")
    weights = "of the linear layers; both: nvfp4, then plain ones to compare with (default: nvfp4)"
    add("--weights", choices=[*KINDS, "both"], default="nvfp4", help=weights)
    add("--steps", type=at_least(1), default=400, help="optimizer steps (default: 400)")
    ours = "fused_adamw is ours, compact_adamw the same with compact state (default: adamw)"
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help=ours)
    add("--lr", type=at_least(0, float), help="peak learning rate (default: the preset's)")
    add("--batch-size", type=at_least(1), default=8, help="sequences per rank (default: 8)")
    add("--sequence-length", type=at_least(1), default=128, help="tokens per sequence (default: 128)")
    add("--micro-batches", type=at_least(1), default=1, help="per step (default: 1)")
    clip = "largest gradient norm, 0: any (default: 1; 0 with --overlap update)"
    add("--clip", type=at_least(0, float), help=clip)
    overlap = "gradients travel in backward passes, weights in forward passes (default: in the step), or "
    overlap += "backward passes update weights, with fused_adamw or compact_adamw"
    add("--overlap", choices=["backward", "forward", "both", "update"], help=overlap)
    add("--seed", type=int, default=0, help="of the initial weights and of the batches (default: 0)")
    profiled = "steps under torch.profiler, to time their phases (default: 3, 0: none)"
    add("--profile-steps", type=at_least(0), default=3, metavar="STEPS", help=profiled)
    add("--out", type=Path, default=Path("runs/train"), help="output folder (default: runs/train)")
    add("--timeout", type=at_least(1, float), default=600.0, help="seconds to wait for a rank (default: 600)")
    add("--checkpoint-every", type=at_least(0), default=0, help="steps; 0: never (default: 0)")
    add("--keep", type=at_least(1), default=2, help="checkpoints that are kept (default: 2)")
    add("--resume", choices=["auto"], help="go on from the last whole checkpoint in --out, if there is one")
    add("--overwrite", action="store_true", help="delete what an earlier run left in --out")
    options = parser.parse_args(arguments)

    context = PRESETS[options.preset].context
    if options.sequence_length > context:
        parser.error(
            f"argument --sequence-length: {options.sequence_length} exceeds the preset's context, {context}"
        )
    if options.overlap == "update":
        if OPTIMIZERS[options.optimizer][0] is not FusedAdamW:
            parser.error("argument --overlap: update takes --optimizer fused_adamw or compact_adamw")
        if options.micro_batches > 1 or options.clip:
            parser.error("argument --overlap: update takes --micro-batches 1 and --clip 0")
    if options.clip is None:
        options.clip = 0.0 if options.overlap == "update" else 1.0
    if options.lr is None:
        options.lr = PRESETS[options.preset].lr
    return options
