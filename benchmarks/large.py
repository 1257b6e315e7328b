"""Training steps of a large model: tokens per second and peak memory, by weights and optimizer."""

import argparse
import functools
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from benchmarks import peers
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Session
from benchmarks.workloads import causal_model, causal_step
from zerofp4.launch import World
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

LR = 1e-5
Made = tuple[nn.Module, torch.optim.Optimizer]


class Way(NamedTuple):
    """A way to train: what a row says of it, and a function that makes the model ready and its optimizer.
    in_passes: backward passes update, so a step has one.
    """

    rule: str
    make: Callable[[nn.Module], Made]
    in_passes: bool = False


def of_bf16(optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Made]:
    return lambda model: (model, optimizer_class(model.parameters(), lr=LR, **options))


def of_ours(convert: bool = True, overlap: str | None = None, **options: Any) -> Callable[..., Made]:
    """options: of ZeroFP4Optimizer."""

    def make(model: nn.Module) -> Made:
        if convert:
            zerofp4.convert_model(model)
        communication = Communication(overlap=overlap)
        return model, ZeroFP4Optimizer(
            model.named_parameters(), FusedAdamW, lr=LR, communication=communication, **options
        )

    return make


def flash_release(model: nn.Module) -> Made:
    optimizer = peers.flash_adamw(model.parameters(), lr=LR)
    from flashoptim import enable_gradient_release

    enable_gradient_release(model, optimizer)  # its step() and zero_grad() do nothing then
    return model, optimizer


def ddp(model: nn.Module) -> Made:
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, peers.zero_redundancy(model.parameters(), lr=LR)


def sharded(model: nn.Module, **options: Any) -> Made:
    for layer in [*model.model.layers, model]:
        fully_shard(layer, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def sharded_on_host(model: nn.Module) -> Made:
    return sharded(model, offload_policy=CPUOffloadPolicy())


def torchao_fp32(model: nn.Module) -> Made:
    return of_bf16(peers.torchao_offload)(model.float())


IN_HOST_MEMORY = {
    "offload": Way("NVFP4 weights, compact state in host memory", of_ours(state="compact", offload=1.0)),
    "offload_half": Way(
        "NVFP4 weights, compact state, half of it in host memory", of_ours(state="compact", offload=0.5)
    ),
    "offload_full": Way("NVFP4 weights, FP32 state in host memory", of_ours(offload=1.0)),
    "torchao": Way("bf16 weights, torchao's CPUOffloadOptimizer, bf16 state", of_bf16(peers.torchao_offload)),
    "torchao_fp32": Way("FP32 weights and autocast, torchao's CPUOffloadOptimizer, FP32 state", torchao_fp32),
    "cpu_offload_policy": Way("bf16 weights, fully_shard with CPUOffloadPolicy, bf16 state", sharded_on_host),
}
WAYS = {
    "bf16": Way("bf16 weights, FusedAdamW with FP32 state", of_ours(convert=False)),
    "flash": Way("bf16 weights, FlashAdamW", of_bf16(peers.flash_adamw)),
    "flash_release": Way("bf16 weights, FlashAdamW, gradient release", flash_release, in_passes=True),
    "compact": Way("NVFP4 weights, compact state", of_ours(state="compact")),
    "updates": Way(
        "NVFP4 weights, compact state, updates in the backward pass",
        of_ours(state="compact", overlap="update"),
        in_passes=True,
    ),
}
WAYS_OF_RANKS = {
    "ddp": Way("bf16 weights, DistributedDataParallel and ZeroRedundancyOptimizer", ddp),
    "fully_shard": Way("bf16 weights, fully_shard of each layer", sharded),
    "full": Way("NVFP4 weights, FP32 state", of_ours()),
    "overlap": Way("NVFP4 weights, FP32 state, overlap='both'", of_ours(overlap="both")),
}
EVERY_WAY = WAYS | IN_HOST_MEMORY | WAYS_OF_RANKS


def large(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of a causal LM from a configuration of transformers, whose layers recompute activations.

    One way after another has the GPUs to itself. On one GPU a way is left out, and the run says so, if it
    runs out of memory, its package cannot be imported, or its backward passes update and a step has several
    of them. Several ranks measure other ways, twice.
    """
    several = world.world_size > 1
    rates: dict[str, list[float]] = {}
    for prefix in ("", "again/")[: 1 + several]:
        timer = Timer(session, world, options.repeats, prefix, warm_up=1)
        for way in options.ways or (WAYS_OF_RANKS if several else WAYS):
            if EVERY_WAY[way].in_passes and options.micro_batches > 1:
                session.say(f"{way} is left out: each of several backward passes would update")
                continue
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
    shape = (options.micro_batches, options.sequences, options.tokens)
    torch.manual_seed(timer.world.rank)
    with timer.peak(f"{way}/memory", f"of steps, {EVERY_WAY[way].rule}") as peak:
        run = make_step(model, way, torch.randint(model.config.vocab_size, shape, device=timer.device))
        rate = 1e3 * timer.world.world_size * math.prod(shape) / timer.time(run, from_idle=True)
    timer.count(
        f"{way}/host", "megabytes", resident() / MEGABYTES, "of the host, in use by rank 0 after the steps"
    )
    timer.count(f"{way}/tokens", "tokens_per_second", rate, EVERY_WAY[way].rule)
    for megabytes in peak:
        rule = f"the peak over {count / 1e9:.2f}e9 parameters, activations included"
        timer.count(f"{way}/peak", "bytes_per_parameter", megabytes * MEGABYTES / count, rule)
    return rate


def resident() -> int:
    """Bytes of host memory that this process has in use, pinned ones included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_step(model: nn.Module, way: str, tokens: torch.Tensor) -> Callable[[], None]:
    """tokens: as of causal_step()."""
    model.train()
    model, optimizer = EVERY_WAY[way].make(model)
    in_fp32 = next(model.parameters()).dtype == torch.float32
    context = functools.partial(torch.autocast, tokens.device.type, torch.bfloat16, enabled=in_fp32)
    return causal_step(model, optimizer, tokens, context)
