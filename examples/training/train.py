"""The loop: forward and backward passes, optimizer steps, validation, checkpoints."""

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import zerofp4
from examples.training import report
from examples.training.checkpoints import CheckpointError, Checkpoints, prepare_folder
from examples.training.data import Batches, Text
from examples.training.model import GPT, PRESETS, parameter_groups
from examples.training.options import OPTIMIZERS, parse_options
from zerofp4.distributed import Stage
from zerofp4.launch import World, destroy_process_group, init_process_group
from zerofp4.ops import SLOW_ON_CPU
from zerofp4.optim import Communication, ZeroFP4Optimizer
from zerofp4.testing import VerificationError, verify_model

VALIDATIONS = 10  # how often in a run the held-out loss is measured
VALIDATION_BATCHES = 8
MOST_SKIPPED = 10  # steps in a row whose gradients hold a NaN or Inf: the run is over then


class Interrupt:
    """Ctrl-C and SIGTERM ask for a stop after the step in progress; a second one stops at once."""

    def __init__(self):
        self.asked, self.signal = False, signal.SIGINT
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, *_) -> None:
        self.asked, self.signal = True, number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    with Stage("averaging losses", dist.group.WORLD):
        dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def warmup_cosine(steps: int) -> Callable[[int], float]:
    """Factor of the peak rate: up over a tenth of the steps (100 at most), then a cosine down to a tenth."""
    warmup = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return factor


def prefers_float32(device: torch.device) -> bool:
    """A CPU without instructions for bfloat16 trains several times as fast in float32."""
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


def build(kind: str, options: argparse.Namespace, world: World) -> tuple[GPT, ZeroFP4Optimizer]:
    """The model of this seed, with linear layers in NVFP4 or without, and the optimizer of its masters.

    The output layer stays in high precision, as NVFP4 training recipes have it: it is small, and no layer
    after it averages its errors out.
    """
    torch.manual_seed(options.seed)
    model = GPT(PRESETS[options.preset]).to(world.device, dtype_of(kind, world.device))
    if kind == "nvfp4":
        zerofp4.convert_model(model, lambda module, name: name != "head")
    else:  # plain weights, to compare with
        warnings.filterwarnings("ignore", r"none of the \d+ parameters is NVFP4")
    optimizer_class, more = OPTIMIZERS[options.optimizer]
    groups, communication = parameter_groups(model, 0.1), Communication(overlap=options.overlap)
    defaults = {"lr": options.lr, "betas": (0.9, 0.95), **more}
    return model, ZeroFP4Optimizer(groups, optimizer_class, communication=communication, **defaults)


@torch.no_grad()
def validate(model: GPT, text: Text, options: argparse.Namespace, world: World) -> float:
    """The mean loss on the same held-out windows at every call."""
    batches = Batches(text.validation, options, world)
    losses = [model.loss(*batches.next()).item() for _ in range(VALIDATION_BATCHES)]
    return mean_over_ranks([sum(losses) / len(losses)], world.device)[0]


def accumulate_gradients(
    model: GPT, optimizer: ZeroFP4Optimizer, batches: Batches, options: argparse.Namespace
) -> float:
    """Forward and backward passes of all micro-batches; returns the loss on this rank."""
    loss = 0.0
    for index in range(options.micro_batches):
        micro_loss = model.loss(*batches.next()) / options.micro_batches
        waits = options.overlap and index + 1 < options.micro_batches
        with optimizer.no_sync() if waits else contextlib.nullcontext():
            micro_loss.backward()
        loss += micro_loss.item()
    return loss


def train(kind: str, options: argparse.Namespace, text: Text, world: World, interrupt: Interrupt) -> dict:
    """Train one model, verify it and return what the summary says about it. Collective."""
    model, optimizer = build(kind, options, world)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(options.steps))
    batches = Batches(text.train, options, world)
    tokens = options.batch_size * options.sequence_length * options.micro_batches * world.world_size
    names = ("preset", "optimizer", "lr", "sequence_length", "micro_batches", "clip", "seed")
    identity = {name: getattr(options, name) for name in names} | {"weights": kind, "text": text.digest}
    identity["global batch"] = options.batch_size * world.world_size
    checkpoints = Checkpoints(options.out / f"checkpoints-{kind}", options.keep, identity, world)
    clocks = {"seconds": 0.0, "timed": 0.0, "timed_steps": 0}
    found = checkpoints.resume(model, optimizer) if options.resume else None
    done = 0
    if found is not None:
        scheduler.load_state_dict(found["scheduler"])
        batches.generator.set_state(found["batches"])
        done, clocks = found["step"], found["clocks"]
        if world.rank == 0:
            same = found["steps"] == options.steps
            rates = f", with the learning rates of {options.steps} steps instead of {found['steps']}"
            print(f"goes on from step {done}{'' if same else rates}", flush=True)
    start, step = time.perf_counter() - clocks["seconds"], done
    last_taken, skipped = done, optimizer.skipped_steps
    recorder = report.Recorder(options.out, kind, options.steps, world.rank == 0, done)
    profiled = max(0, min(options.profile_steps, (options.steps - done - report.WARM_UP) // 2))
    profiler = report.profile_steps(profiled) if profiled else None
    with profiler or contextlib.nullcontext():
        for step in recorder.remaining():
            step_start = time.perf_counter()
            loss = accumulate_gradients(model, optimizer, batches, options)
            norm = None  # backward passes that update leave no gradients
            if options.overlap != "update":
                norm = float(optimizer.clip_grad_norm_(options.clip or math.inf))
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            # The loss takes a rank's wish to stop along, so that all ranks stop after the same step.
            loss, stop = mean_over_ranks([loss, float(interrupt.asked)], world.device)
            if optimizer.skipped_steps == skipped:
                last_taken = step
            skipped = optimizer.skipped_steps
            if not math.isfinite(loss) or step - last_taken == MOST_SKIPPED:
                what = f"the loss is {loss}, and {step - last_taken} steps in a row had a NaN or Inf"
                raise FloatingPointError(f"step {step}: {what}: try a lower --lr than {options.lr}")
            seconds, clocks["seconds"] = time.perf_counter() - step_start, time.perf_counter() - start
            if profiled and step - done <= report.WARM_UP + profiled:
                # Late gathers belong to this step; and torch crashes if one of gloo ends after the profiler.
                optimizer.check()
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                profiler.step()
            elif step > done + 1:  # the first one loads kernels and opens connections
                clocks["timed"] += seconds
                clocks["timed_steps"] += 1
            row = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm}
            row |= {"tokens_per_second": tokens / seconds, "seconds": clocks["seconds"]}
            if step % max(1, options.steps // VALIDATIONS) == 0 or step == options.steps or stop:
                row["validation_loss"] = validate(model, text, options, world)
            recorder.record(row)
            every = options.checkpoint_every
            if every and (step % every == 0 or step == options.steps or stop):
                progress = {"step": step, "steps": options.steps, "clocks": clocks}
                progress |= {"scheduler": scheduler.state_dict(), "batches": batches.generator.get_state()}
                checkpoints.save(step, model, optimizer, progress)
            if stop:
                interrupt.asked = True
                break
    rows = recorder.rows or [dict.fromkeys(("loss", "tokens_per_second"), math.nan)]
    rate = rows[-1]["tokens_per_second"]
    if clocks["timed"]:
        rate = tokens * clocks["timed_steps"] / clocks["timed"]
    sent = optimizer.describe()["bytes_sent"]
    ran = profiler is not None and step - done >= report.WARM_UP + profiled
    return {
        "dtype": str(dtype_of(kind, world.device)).removeprefix("torch."),
        "steps": step,
        "loss": sum(row["loss"] for row in rows) / len(rows),
        "validation_loss": rows[-1].get("validation_loss", math.nan),
        "seconds": clocks["seconds"],
        "tokens_per_second": rate,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "verified": verify_model(model, optimizer),
        "gathered_bytes_per_step": optimizer.gathered_bytes_per_step(),
        "sent_bytes_per_step": sent,
        "phases_of_step": report.phases_of(profiler, profiled, sent, world.device) if ran else {},
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
        "text": {"train": len(text.train), "validation": len(text.validation), "sha256": text.digest},
        "interrupted": False,
        "runs": {},
    }

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    prepare_folder(options, world)
    title = f"GPT {options.preset}, {options.optimizer}, {report.ranks(world)} on {world.device.type}"
    say(f"{title} ({world.backend})")
    if prefers_float32(world.device) and options.weights in ("nvfp4", "both"):
        say("this CPU has no instructions for bfloat16: what is not NVFP4 is float32")
    for kind in kinds_of(options, world.device):
        if not interrupt.asked:
            summary["runs"][kind] = train(kind, options, text, world, interrupt)
            say(report.describe(kind, summary["runs"][kind], world))
            if world.rank == 0 and (phases := summary["runs"][kind]["phases_of_step"]):
                report.show_phases(phases)
    summary["interrupted"] = interrupt.asked
    if world.rank == 0:
        picture = report.draw(options.out, title) or "no picture, for want of matplotlib"
        path = options.out / "summary.json"
        path.write_text(json.dumps(summary, indent=2) + "\n")
        say(f"wrote {path} and {picture}")
    return 128 + interrupt.signal if interrupt.asked else 0


def compute_deterministically() -> None:
    """The same sums in every run of this process from now on.

    Not with warn_only: attention would then warn and keep adding its gradients in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads such memory


def execute(options: argparse.Namespace, world: World) -> int:
    """Train what the options ask for and say what went wrong; returns the exit code. Collective."""
    compute_deterministically()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler reports on every rank
    try:
        return run(options, Text.of_standard_library(), world)
    except (VerificationError, FloatingPointError, CheckpointError) as error:  # every rank raises these
        if world.rank == 0:
            print(f"examples.training: error: {error}", file=sys.stderr, flush=True)
        return 1


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    world = init_process_group(timeout=timedelta(seconds=options.timeout))
    code = execute(options, world)
    destroy_process_group()
    return code
