"""Training steps of a large model: tokens per second and peak memory, by weights and optimizer."""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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
WAYS_OF_RANKS = {
    "ddp": "bf16 weights, DistributedDataParallel and ZeroRedundancyOptimizer",
    "fully_shard": "bf16 weights, fully_shard of each layer",
    "full": "NVFP4 weights, FP32 state",
    "overlap": "NVFP4 weights, FP32 state, overlap='both'",
}
RULES = WAYS | WAYS_OF_RANKS
LR = 1e-5


def large(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of a causal LM from a configuration of transformers, whose layers recompute activations.

    One way after another has the GPUs to itself. On one GPU a way that runs out of memory is left out, and
    FlashAdamW where flashoptim cannot be imported; the run says so. Several ranks measure other ways, twice.
    """
    several = world.world_size > 1
    rates: dict[str, list[float]] = {}
    for prefix in ("", "again/")[: 1 + several]:
        timer = Timer(session, world, options.repeats, prefix)
        for way in options.ways or (WAYS_OF_RANKS if several else WAYS):
            try:
                rates.setdefault(way, []).append(measure(timer, options, way))
            except (ImportError, torch.OutOfMemoryError) as error:
                if several:  # the other ranks would wait
                    raise
                session.say(f"{way} is left out: {str(error).partition('.')[0]}")
            free_memory(session.device)
    timer, means = Timer(session, world, 0), {way: statistics.mean(own) for way, own in rates.items() if own}
    for way in means.keys() & {"full", "overlap"}:
        for other in means.keys() & {"ddp", "fully_shard"}:
            rule = "tokens per second of ours over theirs"
            timer.count(f"{way}/over_{other}", "speedup", means[way] / means[other], rule)


def measure(timer: Timer, options: argparse.Namespace, way: str) -> float:
    """Tokens per second of all ranks."""
    torch.manual_seed(0)
    model = causal_model(options.config, timer.device, layers=options.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    count = sum(p.numel() for p in model.parameters())
    shape = (options.sequences, options.tokens)
    torch.manual_seed(timer.world.rank)
    with timer.peak(f"{way}/memory", f"of steps, {RULES[way]}") as peak:
        run = make_step(model, way, torch.randint(model.config.vocab_size, shape, device=timer.device))
        rate = 1e3 * timer.world.world_size * shape[0] * shape[1] / timer.time(run, from_idle=True)
    timer.count(f"{way}/tokens", "tokens_per_second", rate, RULES[way])
    for megabytes in peak:
        rule = f"the peak over {count / 1e9:.2f}e9 parameters, activations included"
        timer.count(f"{way}/peak", "bytes_per_parameter", megabytes * MEGABYTES / count, rule)
    return rate


def make_step(model: nn.Module, way: str, tokens: torch.Tensor) -> Callable[[], None]:
    model.train()
    if way == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return causal_step(model, peers.zero_redundancy(model.parameters(), lr=LR), tokens)
    if way == "fully_shard":
        for layer in [*model.model.layers, model]:
            fully_shard(layer)
        return causal_step(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), tokens)
    if way.startswith("flash"):
        optimizer = peers.flash_adamw(model.parameters(), lr=LR)
        if way == "flash_release":
            from flashoptim import enable_gradient_release

            enable_gradient_release(model, optimizer)  # its step() and zero_grad() do nothing then
        return causal_step(model, optimizer, tokens)
    if way != "bf16":
        zerofp4.convert_model(model)
    communication = Communication(overlap={"updates": "update", "overlap": "both"}.get(way))
    state = "compact" if way in ("compact", "updates") else "full"
    options = {"state": state, "communication": communication, "lr": LR}
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, **options)
    return causal_step(model, optimizer, tokens)
