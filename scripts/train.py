#!/usr/bin/env python3
"""Train a GPT on Python source, byte by byte or in tokens, with NVFP4, bfloat16 or float32 weights.

FP32 masters and the optimizer's state are sharded over the ranks (ZeRO-1) for both kinds of weights. At the
end every weight of the live model is checked on every rank: the same bytes everywhere, and the bytes that
quantizing the whole FP32 master gives. Alone, under torchrun or under mpirun:

    python scripts/train.py --steps 200
    python scripts/train.py --steps 5000 --checkpoint-every 500 --resume auto
    torchrun --standalone --nproc-per-node 2 scripts/train.py --weights both --out runs/both
    torchrun --standalone --nproc-per-node 2 scripts/train.py --parallel fsdp2 --weights both
    mpirun -n 2 python scripts/train.py
    python scripts/train.py --preset 124m --recipe nvfp4 --micro-batches 4 --corpus all --tokenizer 8192
    python scripts/train.py --config llama/config.json --corpus books/ --tokenizer 4096
    python scripts/train.py --optimizer compact_adamw --overlap update
    python scripts/train.py --config examples/configs/llama_20b.json --recompute --sequence-length 2048 \\
        --batch-size 2 --optimizer compact_adamw --overlap update --steps 20

A corpus may be a file or a folder of your own, and the model one of Hugging Face's transformers.

With a recipe, layers quantize activations and gradients too, and multiply those.

What is not NVFP4 is bfloat16. On a CPU without instructions for that, it is float32, also instead of the
bfloat16 weights of `--weights both`.
"""

import argparse
import contextlib
import faulthandler
import math
import os
import platform
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import CheckpointError, prepare_folder
from gpt import GPT, PRESETS, parameter_groups
from hugging_face import ConfigError, layers_of, loss_of, make_model
from memory import Memory
from phases import Phases, StepProfile, described, show
from progress import Progress
from report import Recorder, describe, draw, ranks, write_summary
from sharded import shard, sharded
from text import Batches, Text, TextTooShortError, in_tokens
from torch import nn
from train_options import CORPORA, OPTIMIZERS, RECIPES, add_options, complete

import zerofp4
from zerofp4.distributed import Stage
from zerofp4.launch.process_group import World, destroy_process_group, init_process_group
from zerofp4.ops import SLOW_ON_CPU
from zerofp4.optim import Communication, ZeroFP4Optimizer
from zerofp4.testing import VerificationError, verify_weights

VALIDATIONS = 10  # how often in a run the held-out loss is measured
VALIDATION_BATCHES = 8
MOST_SKIPPED = 10  # steps in a row that are skipped for gradients with a NaN or Inf: the run is over then


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    complete(options, parser)
    return options


class DivergedError(RuntimeError):
    """The loss is not finite, or the gradients have not been for long."""


AT_ONCE = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupt:
    """Ctrl-C and SIGTERM ask for a stop after the step in progress; a second one stops at once, even where a
    shell that began the run in the background had it ignored."""

    def __init__(self):
        self.asked = False
        self.signal = signal.SIGINT
        for number in AT_ONCE:
            signal.signal(number, self._handle)

    def _handle(self, number: int, *_) -> None:
        self.asked, self.signal = True, number
        for other, handler in AT_ONCE.items():
            signal.signal(other, handler)


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    with Stage("averaging losses", dist.group.WORLD):
        dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def warmup_cosine(steps: int):
    """Factor of the peak rate: up over a tenth of the steps (100 at most), then a cosine down to a tenth."""
    warmup = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return factor


def prefers_float32(device: torch.device) -> bool:
    """A CPU without instructions for bfloat16 trains in float32 several times as fast."""
    return device.type == "cpu" and torch.bfloat16 in SLOW_ON_CPU


def kinds_of(options: argparse.Namespace, device: torch.device) -> list[str]:
    if options.weights != "both":
        return [options.weights]
    return ["nvfp4", "fp32" if prefers_float32(device) else "bf16"]


def dtype_of(kind: str, device: torch.device) -> torch.dtype:
    """Of all parameters, and of activations."""
    if kind == "fp32" or (kind == "nvfp4" and prefers_float32(device)):
        return torch.float32
    return torch.bfloat16


def build(
    kind: str, options: argparse.Namespace, vocabulary: int, world: World
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of this seed, with linear layers in NVFP4 or without, and the optimizer of its masters:
    ZeroFP4Optimizer, or, with --parallel fsdp2, one of torch's with what it lacks (sharded.py).

    The output layer stays in high precision, as NVFP4 training recipes have it: it is small, and no layer
    after it averages its errors out.
    """
    torch.manual_seed(options.seed)
    quantizes, is_sharded = RECIPES[options.recipe] is not None, options.parallel == "fsdp2"
    dtype = dtype_of(kind, world.device)
    if options.config is not None:
        config, recomputes = Path(options.config), options.recompute
        model = make_model(config, vocabulary, world.device, recomputes, options.layers, dtype)
        blocks, takes = layers_of(model), None  # all but the output layer, and embeddings
    else:
        linear = zerofp4.nn.Linear if quantizes else nn.Linear
        model = GPT(PRESETS[options.preset], vocabulary, linear).to(world.device)
        blocks, takes = model.blocks, lambda module, name: name != "head"
    for parameter in model.parameters():  # buffers, such as rotary frequencies, stay as they are
        parameter.data = parameter.data.to(dtype)
    if kind == "nvfp4" and not is_sharded:
        zerofp4.convert_model(model, takes, layers=quantizes and options.config is not None)
    optimizer_class, defaults = OPTIMIZERS[options.optimizer]
    defaults = {**defaults, "lr": options.lr}
    if is_sharded:
        shard(model.float(), blocks, kind == "nvfp4", takes, world, dtype)
        groups = parameter_groups(model, defaults.pop("weight_decay", 0.0))
        optimizer = sharded(optimizer_class)(groups, **defaults)
        optimizer.begin(model, kind == "nvfp4", options.micro_batches, dtype)
        return model, optimizer
    groups = parameter_groups(model, defaults.pop("weight_decay", 0.0))
    names = "transport", "reduction", "overlap", "accumulate"
    travel = {name: getattr(options, name) for name in names}
    travel["gradient_dtype"] = options.gradient_dtype and getattr(torch, options.gradient_dtype)
    communication = Communication(**travel)
    if kind != "nvfp4":  # plain weights, to compare with
        warnings.filterwarnings("ignore", r"none of the \d+ parameters is NVFP4")
    return model, ZeroFP4Optimizer(groups, optimizer_class, communication=communication, **defaults)


def draw_batches(data: torch.Tensor, options: argparse.Namespace, world: World) -> Batches:
    size, length = options.batch_size, options.sequence_length
    return Batches(data, size, length, world.rank, world.world_size, options.seed)


def computing(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """The context of forward passes."""
    recipe = RECIPES[options.recipe]
    return contextlib.nullcontext() if recipe is None else zerofp4.nn.autocast(recipe)


def compute_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, *first: bool) -> torch.Tensor:
    """first: what layers that quantize take besides their input; transformers passes nothing on to them."""
    return model.loss(tokens, targets, *first) if isinstance(model, GPT) else loss_of(model, tokens, targets)


@torch.no_grad()
def validate(model: nn.Module, text: Text, options: argparse.Namespace, world: World) -> float:
    """The mean loss on the same held-out windows at every call."""
    batches = draw_batches(text.validation, options, world)
    model.eval()
    with computing(options):
        losses = [compute_loss(model, *batches.next(world.device)) for _ in range(VALIDATION_BATCHES)]
        losses = [loss.item() for loss in losses]
    model.train()
    return mean_over_ranks([sum(losses) / len(losses)], world.device)[0]


def verify(model: nn.Module, optimizer: ZeroFP4Optimizer) -> dict[str, int]:
    """verify_model(), one weight after the other: the masters of a large model fit into memory once."""
    weights = dict(model.named_parameters())
    found = {"nvfp4_weights": 0, "other_weights": 0}
    for name, master in zerofp4.master_state_dict(model, optimizer):
        if name in weights:  # else a buffer, or a second name
            for kind, count in verify_weights({name: weights.pop(name)}, [master]).items():
                found[kind] += count
    if weights:
        raise VerificationError(f"nothing was found to verify {', '.join(weights)}")
    return found


def train(kind: str, options: argparse.Namespace, text: Text, world: World, interrupt: Interrupt) -> dict:
    """Train one model, verify it and return what the summary says about it. Collective."""
    model, optimizer = build(kind, options, text.vocabulary, world)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(options.steps))
    batches = draw_batches(text.train, options, world)
    tokens = options.batch_size * options.sequence_length * options.micro_batches * world.world_size
    validate_every = max(1, options.steps // VALIDATIONS)
    progress = Progress(kind, options, text, world, (model, optimizer, scheduler, batches))
    progress.resume()
    start = time.perf_counter() - progress.seconds
    skipped_in_a_row = 0
    memory = Memory(world.device, options.steps, described(optimizer)["shared_bytes"])
    phases = Phases(world.device)
    profile = StepProfile(optimizer, world.device, progress.step, options.steps, options.profile_steps)
    with Recorder(options.out, kind, options.steps, world.rank == 0, progress.step) as recorder, profile:
        for step in range(progress.step + 1, options.steps + 1):
            profiled = profile.begin(step)
            step_start = time.perf_counter()
            loss = 0.0
            phases.mark()
            for index in range(options.micro_batches):
                # With a recipe, the first micro-batch quantizes weights that are not.
                first = () if options.recipe == "none" else (index == 0,)
                with computing(options):
                    batch = batches.next(world.device)
                    micro_loss = compute_loss(model, *batch, *first) / options.micro_batches
                is_last = index + 1 == options.micro_batches
                waits = options.overlap and options.accumulate == "local" and not is_last
                with optimizer.no_sync() if waits else contextlib.nullcontext():
                    micro_loss.backward()
                loss += micro_loss.item()
            phases.mark()
            norm = None  # backward passes that update leave no gradients
            if options.overlap != "update":
                norm = float(optimizer.clip_grad_norm_(options.clip or math.inf))
            skipped = optimizer.skipped_steps
            phases.mark()
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            phases.mark()
            skipped_in_a_row = skipped_in_a_row + 1 if optimizer.skipped_steps > skipped else 0
            scheduler.step()
            optimizer.zero_grad()
            # The loss takes a rank's wish to stop along, so that all ranks stop after the same step.
            loss, stop = mean_over_ranks([loss, float(interrupt.asked)], world.device)
            if not math.isfinite(loss):
                raise DivergedError(f"the loss is {loss} at step {step}: try a lower --lr than {options.lr}")
            if skipped_in_a_row == MOST_SKIPPED:
                raise DivergedError(
                    f"the gradients of {MOST_SKIPPED} steps, the last of them {step}, hold a NaN or Inf, "
                    f"that of {optimizer.first_nonfinite()} first: try a lower --lr than {options.lr}"
                )
            seconds = time.perf_counter() - step_start
            times = phases.count(left_out=profiled)
            progress.count(step, seconds, time.perf_counter() - start, left_out=profiled)
            if profiled:
                profile.end(step, seconds, times)
            row = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm}
            row |= {"tokens_per_second": tokens / seconds, "seconds": progress.seconds}
            if step % validate_every == 0 or step == options.steps or stop:
                row["validation_loss"] = validate(model, text, options, world)
            recorder.record(row)
            memory.note(step)
            progress.save_if_due(bool(stop))
            if stop:
                interrupt.asked = True
                break
    return {
        "dtype": str(dtype_of(kind, world.device)).removeprefix("torch."),
        **(summary := progress.summary(list(recorder.rows), tokens)),
        "validation_loss_per_byte": summary["validation_loss"] / text.bytes_per_token,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "verified": optimizer.verify() if options.parallel == "fsdp2" else verify(model, optimizer),
        "gathered_bytes_per_step": optimizer.gathered_bytes_per_step(),
        "milliseconds_per_step": phases.of_step(),
        "sent_bytes_per_step": described(optimizer)["bytes_sent"],
        "phases_of_step": profile.of_step(),
        "peak_memory_mb": memory.of_all_ranks(),
    }


def run(options: argparse.Namespace, text: Text, world: World) -> int:
    """Train and write the summary; returns the exit code. Collective."""
    interrupt = Interrupt()
    summary = {
        "options": {**vars(options), "out": str(options.out)},
        "world_size": world.world_size,
        "device": str(world.device),
        "backend": world.backend,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "build": zerofp4.build_info(),
        "text": {
            "train": len(text.train),
            "validation": len(text.validation),
            "vocabulary": text.vocabulary,
            "bytes_per_token": text.bytes_per_token,
            "sha256": text.digest,
        },
        "interrupted": False,
        "runs": {},
    }

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    prepare_folder(options, world)
    name = f"GPT {options.preset}" if options.config is None else options.config
    title = f"{name}, {options.optimizer}, {ranks(world)} on {world.device.type}"
    say(f"{title} ({world.backend})")
    if prefers_float32(world.device) and options.weights in ("nvfp4", "both"):
        say("this CPU has no instructions for bfloat16: what is not NVFP4 is float32")
    for kind in kinds_of(options, world.device):
        if not interrupt.asked:
            summary["runs"][kind] = train(kind, options, text, world, interrupt)
            say(describe(kind, summary["runs"][kind], text, world))
            if world.rank == 0:
                show(summary["runs"][kind]["phases_of_step"])
    summary["interrupted"] = interrupt.asked
    if world.rank == 0:
        picture = draw(options.out, title) or "no picture, for want of matplotlib"
        say(f"wrote {write_summary(options.out, summary)} and {picture}")
    return 128 + interrupt.signal if interrupt.asked else 0


def compute_deterministically() -> None:
    """The same sums in every run of this process from now on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads such memory


def execute(options: argparse.Namespace, world: World) -> int:
    """Train what the options ask for and say what went wrong; returns the exit code. Collective."""
    compute_deterministically()
    # Else torch's profiler says on each rank when it begins and ends; what it has not seen, the summary says.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        path = None if options.corpus in CORPORA else Path(options.corpus)
        text = CORPORA[options.corpus]() if path is None else Text.of_path(path)
        text = in_tokens(text, options.tokenizer, world)
        text.check(options.sequence_length)
        return run(options, text, world)
    # Every rank raises these.
    except (VerificationError, DivergedError, CheckpointError, TextTooShortError, ConfigError) as error:
        if world.rank == 0:
            print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        return 1


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    world = init_process_group(timeout=timedelta(seconds=options.timeout))
    code = execute(options, world)
    destroy_process_group()
    return code


if __name__ == "__main__":
    faulthandler.enable()  # NCCL ends a process that waits too long: where it was is all that it can say
    sys.exit(main())
