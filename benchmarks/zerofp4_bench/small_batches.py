"""Training steps of few tokens, where the host counts: NVFP4 weights, and layers of a recipe, beside bf16."""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4.launch import World
from zerofp4_bench.layers import RECIPES
from zerofp4_bench.ranks import free_memory
from zerofp4_bench.session import Session

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "configs" / "llama_1b.json"
LENGTH = 2048
"""Tokens of a sequence."""
STEPS = 5
"""That follow each other without waiting for the device: what is timed at once."""
WARM_UP = 2

WAYS = {
    "bf16": "bf16 weights",
    "weights": "NVFP4 weights, products in bf16",
    "layers": "NVFP4 weights, layers of the recipe",
}
MODES = {
    "eager": "eager",
    "compiled": "each decoder layer by torch.compile",
}
SEQUENCES = (1, 4)
"""Of a step."""


def small_batches(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of Llama-3.2-1B's shape, by transformers, with FusedAdamW: forward, backward and optimizer.

    NVFP4 weights, and layers of a recipe that have such weights, take turns with bf16 ones in one process:
    eagerly, and with decoder layers that torch.compile has compiled.
    """
    for mode in options.modes:
        for sequences in SEQUENCES:
            measure(session, options, mode, sequences)
            free_memory(session.device)


def measure(session: Session, options: argparse.Namespace, mode: str, sequences: int) -> None:
    shape = (sequences, max(LENGTH // options.scale, 2))
    name = f"{mode}/{shape[0]}x{shape[1]}"
    runs = {way: make_step(session.device, options, way, mode, shape) for way in WAYS}
    times = {way: [] for way in WAYS}
    for _ in range(WARM_UP + options.repeats):
        for way, run in runs.items():
            session.clock.synchronize()
            begin = time.perf_counter()
            for _ in range(STEPS):
                run()
            session.clock.synchronize()
            times[way].append((time.perf_counter() - begin) / STEPS)
    rates = {way: shape[0] * shape[1] / statistics.median(own[WARM_UP:]) for way, own in times.items()}
    for way, rate in rates.items():
        session.count(f"{name}/{way}", "tokens_per_second", rate, f"{WAYS[way]}, {MODES[mode]}")
    for way in ("weights", "layers"):
        rule = "tokens a second over those of bf16"
        session.count(f"{name}/{way}_over_bf16", "speedup", rates[way] / rates["bf16"], rule)


def make_step(
    device: torch.device, options: argparse.Namespace, way: str, mode: str, shape: tuple[int, int]
) -> Callable[[], object]:
    """A call that trains a model of its own by one step."""
    torch.manual_seed(0)
    model = make_model(device, options.scale, options.layers)
    if way != "bf16":
        zerofp4.convert_model(model, layers=way == "layers")
    if mode == "compiled":
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=1e-5)
    tokens = torch.randint(model.config.vocab_size, shape, device=device)
    recipe = RECIPES["linear"] if way == "layers" else None

    def step() -> None:
        optimizer.zero_grad()
        with contextlib.nullcontext() if recipe is None else zerofp4.nn.autocast(recipe):
            logits = model(input_ids=tokens, use_cache=False).logits
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


def make_model(device: torch.device, scale: int, layers: int | None) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig.from_json_file(CONFIG)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        setattr(config, name, max(getattr(config, name) // scale, config.num_key_value_heads))
    config.head_dim = config.hidden_size // config.num_attention_heads
    config.num_hidden_layers = layers or config.num_hidden_layers
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
