"""Training steps of a large model on one GPU: tokens a second and peak memory, by weights and optimizer."""

import argparse
from collections.abc import Callable

import torch
from torch import nn

import zerofp4
from benchmarks import peers
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Session
from benchmarks.workloads import causal_model, causal_step
from zerofp4.launch import World
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

WAYS = {
    "bf16": "bf16 weights, FusedAdamW with FP32 state",
    "flash": "bf16 weights, FlashAdamW",
    "flash_release": "bf16 weights, FlashAdamW, gradient release",
    "compact": "NVFP4 weights, compact state",
    "updates": "NVFP4 weights, compact state, updates in the backward pass",
}
LR = 1e-5


def large(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of a causal LM from a configuration of transformers, whose layers recompute activations.

    One way after another has the GPU to itself. A way that runs out of memory is left out, and FlashAdamW
    where flashoptim cannot be imported; the run says so.
    """
    if world.world_size > 1:
        raise ValueError("large measures one rank: start it without a launcher")
    for way in options.ways:
        try:
            measure(Timer(session, world, options.repeats), options, way)
        except (ImportError, torch.OutOfMemoryError) as error:
            session.say(f"{way} is left out: {str(error).partition('.')[0]}")
        free_memory(session.device)


def measure(timer: Timer, options: argparse.Namespace, way: str) -> None:
    torch.manual_seed(0)
    model = causal_model(options.config, timer.device, layers=options.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    count = sum(p.numel() for p in model.parameters())
    shape = (options.sequences, options.tokens)
    with timer.peak(f"{way}/memory", f"of steps, {WAYS[way]}") as peak:
        run = make_step(model, way, torch.randint(model.config.vocab_size, shape, device=timer.device))
        rate = 1e3 * shape[0] * shape[1] / timer.time(run, from_idle=True)
    timer.count(f"{way}/tokens", "tokens_per_second", rate, WAYS[way])
    for megabytes in peak:
        rule = f"the peak over {count / 1e9:.2f}e9 parameters, activations included"
        timer.count(f"{way}/peak", "bytes_per_parameter", megabytes * MEGABYTES / count, rule)


def make_step(model: nn.Module, way: str, tokens: torch.Tensor) -> Callable[[], None]:
    model.train()
    if way.startswith("flash"):
        optimizer = peers.flash_adamw(model.parameters(), lr=LR)
        if way == "flash_release":
            from flashoptim import enable_gradient_release

            enable_gradient_release(model, optimizer)  # its step() and zero_grad() do nothing then
        return causal_step(model, optimizer, tokens)
    if way != "bf16":
        zerofp4.convert_model(model)
    communication = Communication(overlap="update" if way == "updates" else None)
    options = {"state": "full" if way == "bf16" else "compact", "communication": communication, "lr": LR}
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, **options)
    return causal_step(model, optimizer, tokens)
