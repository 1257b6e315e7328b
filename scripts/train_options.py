"""The options of scripts/train.py: what a run can be told, and what of that cannot go together."""

import argparse
import importlib.util
import math
from pathlib import Path

import torch
from checkpoints import add_checkpoint_options
from gpt import PRESETS
from hugging_face import ConfigError, config_file, longest_sequence
from report import KINDS
from text import Text

import zerofp4
from zerofp4.optim import FusedAdamW
from zerofp4.optim.communication import REDUCTIONS, TRANSPORTS

# Class and arguments; without an lr the preset's is the default.
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    "fused_adamw": (FusedAdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    "compact_adamw": (FusedAdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1, "state": "compact"}),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95)}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
}
RECIPES = {
    "none": None,
    "nvfp4": zerofp4.nn.NVFP4Recipe(),
    "nvfp4-dequantized": zerofp4.nn.NVFP4Recipe(backward="dequantized"),
    "mxfp8": zerofp4.nn.MXFP8Recipe(),
}
PARALLEL = ("zero", "fsdp2")
CORPORA = {"stdlib": Text.of_standard_library, "all": Text.of_installation}
CONFIG_LR = 6e-4  # of a model of which no preset says one


def at_least(kind: type, smallest: float):
    """A type for argparse: finite numbers of that kind, not below `smallest`."""

    def convert(value: str):
        number = kind(value)
        if not number >= smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        if number == math.inf:
            raise argparse.ArgumentTypeError(f"must be finite, got {value}")
        return number

    convert.__name__ = kind.__name__  # argparse names it when the value is no number
    return convert


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="1m", help="model, named by its parameters (default: 1m)")
    weights = "of the linear layers; both: nvfp4 and what the others are (default: nvfp4)"
    add("--weights", choices=[*KINDS, "both"], default="nvfp4", help=weights)
    add("--parallel", choices=PARALLEL, default="zero", help="ours, or torch's fully_shard (default: zero)")
    add("--steps", type=at_least(int, 1), default=400, help="optimizer steps (default: 400)")
    ours = "fused_adamw is ours, compact_adamw it with compact state (default: adamw)"
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help=ours)
    add("--transport", choices=TRANSPORTS, default="auto", help="of ZeroFP4Optimizer (default: auto)")
    sums = "how gradients are added up (default: ordered)"
    add("--reduction", choices=REDUCTIONS, default="ordered", help=sums)
    add("--lr", type=at_least(float, 0.0), help="peak learning rate (default: the preset's; sgd: 0.3)")
    add("--batch-size", type=at_least(int, 1), default=8, help="sequences, per rank (default: 8)")
    add(
        "--recipe",
        choices=RECIPES,
        default="none",
        help="what products are made of (default: none, weights as they are)",
    )
    add("--config", type=Path, help="config.json of transformers, in place of a preset")
    add("--layers", type=at_least(int, 1), help="of --config, in place of the number that it has")
    recompute = "layers of --config keep their inputs alone for the backward pass"
    add("--recompute", action="store_true", help=recompute)
    corpus = "stdlib, all below its folder, or a file or folder of text (default: stdlib)"
    add("--corpus", default="stdlib", metavar="{stdlib,all,PATH}", help=corpus)
    add("--tokenizer", type=at_least(int, 257), metavar="TOKENS", help="train one (default: bytes)")
    add("--sequence-length", type=at_least(int, 1), default=128, help="tokens per sequence (default: 128)")
    micro_batches = ("--micro-batches", "--grad-accumulation")
    add(*micro_batches, type=at_least(int, 1), default=1, help="per step (default: 1)")
    clip = "largest gradient norm, 0: any (default: 1; 0 with --overlap update)"
    add("--clip", type=at_least(float, 0.0), help=clip)
    overlap = "gradients travel in backward passes, weights in forward passes (default: in the step), or "
    overlap += "backward passes update weights, with fused_adamw or compact_adamw"
    add("--overlap", choices=["backward", "forward", "both", "update"], help=overlap)
    sums = "micro-batches: in gradients, or as means in FP32 slices (default: local)"
    add("--accumulate", choices=["local", "sharded"], default="local", help=sums)
    add("--gradient-dtype", choices=["float32"], help="what micro-batches add up in (default: the weights')")
    add("--seed", type=int, default=0, help="of the initial weights and of the batches (default: 0)")
    profiled = "steps under torch.profiler, to time their phases; none with fsdp2 (default: 3, 0: none)"
    add("--profile-steps", type=at_least(int, 0), default=3, metavar="STEPS", help=profiled)
    add("--out", type=Path, default=Path("runs/train"), help="output folder (default: runs/train)")
    add(
        "--timeout",
        type=at_least(float, 1.0),
        default=600.0,
        help="seconds to wait for a rank (default: 600)",
    )
    add_checkpoint_options(parser, at_least)


def complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Defaults that depend on other options. Ends the program where options exclude each other."""
    name, context = f"preset {options.preset}", PRESETS[options.preset].context
    if options.config is not None:
        try:
            options.config = str(config_file(options.config))
            name, context = options.config, longest_sequence(Path(options.config))
        except ConfigError as error:
            parser.error(f"argument --config: {error}")
        if options.recipe != "none" and options.weights != "nvfp4":
            parser.error(f"argument --recipe: {options.recipe} with --config takes --weights nvfp4")
        if options.recipe != "none" and options.parallel == "fsdp2":
            parser.error(f"argument --recipe: {options.recipe} with --config takes --parallel zero")
    elif options.recompute or options.layers is not None:
        parser.error(f"argument --{'recompute' if options.recompute else 'layers'}: takes --config")
    if context is not None and options.sequence_length > context:
        parser.error(
            f"argument --sequence-length: {options.sequence_length} is longer than the context of {name}, "
            f"which is {context}"
        )
    of_ours = {"overlap": None, "accumulate": "local", "gradient_dtype": None, "reduction": "ordered"}
    for name, default in of_ours.items():
        if options.parallel == "fsdp2" and getattr(options, name) != default:
            parser.error(f"argument --{name.replace('_', '-')}: takes --parallel zero")
    if options.overlap == "update":
        if OPTIMIZERS[options.optimizer][0] is not FusedAdamW:
            parser.error("argument --overlap: update takes --optimizer fused_adamw or compact_adamw")
        if options.micro_batches > 1 or options.clip:
            parser.error("argument --overlap: update takes --micro-batches 1 and --clip 0")
    if options.clip is None:
        options.clip = 0.0 if options.overlap == "update" else 1.0
    if options.corpus not in CORPORA and not Path(options.corpus).exists():
        parser.error(f"argument --corpus: there is no {options.corpus}, nor is it {' or '.join(CORPORA)}")
    if options.recipe == "mxfp8" and options.weights in ("nvfp4", "both"):
        parser.error("argument --recipe: mxfp8 takes --weights bf16 or fp32: it multiplies no NVFP4 ones")
    if options.tokenizer is not None and importlib.util.find_spec("tokenizers") is None:
        parser.error("argument --tokenizer: needs the library tokenizers (pip install tokenizers)")
    if options.lr is None:
        default = CONFIG_LR if options.config is not None else PRESETS[options.preset].lr
        options.lr = OPTIMIZERS[options.optimizer][1].get("lr", default)
