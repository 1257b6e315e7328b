"""Training steps of few tokens, where the host counts: NVFP4 weights, and layers of a recipe, beside bf16."""

import argparse
import contextlib
from collections.abc import Callable
from functools import partial

import torch

import zerofp4
from benchmarks.layers import RECIPE
from benchmarks.ranks import Timer, free_memory
from benchmarks.session import Session
from benchmarks.workloads import CONFIGS, causal_model, causal_step
from zerofp4.launch import World

LENGTH = 2048
"""Tokens of a sequence."""
STEPS = 5
"""That follow each other without waiting for the device: what is timed at once."""

WAYS = {
    "bf16": "bf16 weights",
    "weights": "NVFP4 weights, products in bf16",
    "layers": "NVFP4 weights, layers of the recipe",
}
MODES = {"eager": "eager", "compiled": "each decoder layer by torch.compile"}
SEQUENCES = (1, 4)
"""Of a step."""


def small_batches(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of Llama-3.2-1B's shape, by transformers, with FusedAdamW: forward, backward and optimizer.

    NVFP4 weights, and layers of a recipe that have such weights, take turns with bf16 ones in one process:
    eagerly, and with decoder layers that torch.compile has compiled.
    """
    for mode in options.modes:
        for sequences in SEQUENCES:
            measure(Timer(session, world, options.repeats), options, mode, sequences)
            free_memory(session.device)


def measure(timer: Timer, options: argparse.Namespace, mode: str, sequences: int) -> None:
    session, shape = timer.session, (sequences, max(LENGTH // options.scale, 2))
    name = f"{mode}/{shape[0]}x{shape[1]}"
    runs = [make_step(session.device, options, way, mode, shape) for way in WAYS]
    times = timer.in_turns(*(partial(repeat, run) for run in runs), from_idle=True)
    rates = {way: 1e3 * shape[0] * shape[1] * STEPS / ms for way, ms in zip(WAYS, times, strict=True)}
    for way, rate in rates.items():
        session.count(f"{name}/{way}", "tokens_per_second", rate, f"{WAYS[way]}, {MODES[mode]}")
    for way in ("weights", "layers"):
        rule = "tokens a second over those of bf16"
        session.count(f"{name}/{way}_over_bf16", "speedup", rates[way] / rates["bf16"], rule)


def repeat(run: Callable[[], object]) -> None:
    for _ in range(STEPS):
        run()


def make_step(
    device: torch.device, options: argparse.Namespace, way: str, mode: str, shape: tuple[int, int]
) -> Callable[[], object]:
    """A call that trains a model of its own by one step."""
    torch.manual_seed(0)
    model = causal_model(CONFIGS / "llama_1b.json", device, options.scale, options.layers)
    if way != "bf16":
        zerofp4.convert_model(model, layers=way == "layers", block=(16, 16))
    if mode == "compiled":
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=1e-5)
    tokens = torch.randint(model.config.vocab_size, shape, device=device)
    context = partial(zerofp4.nn.autocast, RECIPE) if way == "layers" else contextlib.nullcontext
    return causal_step(model, optimizer, tokens, context)
