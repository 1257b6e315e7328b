"""Training steps of a large model: tokens per second and peak memory, by weights and optimizer."""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofp4
from benchmarks import peers
from benchmarks.checkpoints import resident
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Session
from benchmarks.workloads import causal_model, causal_step
from zerofp4.launch import World
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

LR = 1e-5
Made = tuple[nn.Module, torch.optim.Optimizer]


class Way(NamedTuple):
    """A way to train: what a row says of it, and a function that makes the model ready and its optimizer.
    in_passes: backward passes update, so a step has one. on_meta: the model begins on the meta device, and no
    place ever holds all of its bf16 values.
    """

    rule: str
    make: Callable[[nn.Module], Made]
    in_passes: bool = False
    on_meta: bool = False


def of_bf16(optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Made]:
    return lambda model: (model, optimizer_class(model.parameters(), lr=LR, **options))


def of_ours(convert: bool = True, overlap: str | None = None, **options: Any) -> Callable[..., Made]:
    """options: of ZeroFP4Optimizer."""

    def make(model: nn.Module) -> Made:
        if convert:
            zerofp4.convert_model(model, block=(16, 16))
        communication = Communication(overlap=overlap)
        return model, ZeroFP4Optimizer(
            model.named_parameters(), FusedAdamW, lr=LR, communication=communication, **options
        )

    return make


def leave_meta(model: nn.Module, device: torch.device) -> None:
    """Convert a model of the meta device and give it memory, and values of buffers. The optimizer makes those
    of parameters.
    """
    zerofp4.convert_model(model, block=(16, 16))
    model.to_empty(device=device)
    model.tie_weights()
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def initial_value(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """For masters_from, made on the parameter's device."""
    values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
    return values.normal_(std=0.02) if values.dim() > 1 else values.fill_(float(name.endswith("weight")))


def in_host_memory(rule: str, overlap: str | None = None, **options: Any) -> Way:
    """options: of ZeroFP4Optimizer, `offload` among them."""
    options = {"convert": False, "masters_from": initial_value} | options
    return Way(rule, of_ours(overlap=overlap, **options), in_passes=overlap == "update", on_meta=True)


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
    "offload": in_host_memory("NVFP4 weights, compact state in host memory", state="compact", offload=1.0),
    "offload_half": in_host_memory(
        "NVFP4 weights, compact state, half of it in host memory", state="compact", offload=0.5
    ),
    "offload_full": in_host_memory("NVFP4 weights, FP32 state in host memory", offload=1.0),
    "offload_updates": in_host_memory(
        "NVFP4 weights, compact state in host memory, updates in the backward pass",
        overlap="update",
        state="compact",
        offload=1.0,
    ),
    "offload_sums": in_host_memory(
        "NVFP4 weights, compact state and sums of gradients in host memory",
        state="compact",
        offload=1.0,
        offload_gradients=True,
    ),
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
    of them. Several ranks measure other ways; all of them twice, if there are several.

    Of each step a line has the loss, the seconds and the host memory in use; the first one is not timed.
    """
    several, rates = world.world_size > 1, {}
    ways = options.ways or (WAYS_OF_RANKS if several else WAYS)
    for prefix in ("", "again/")[: 1 + (several and len(ways) > 1)]:
        timer = Timer(session, world, options.repeats, prefix, warm_up=1)
        for way in ways:
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
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the peak from here on
    begin = time.perf_counter()
    torch.manual_seed(0)
    start = torch.device("meta") if EVERY_WAY[way].on_meta else timer.device
    model = causal_model(options.config, start, layers=options.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    count = sum(p.numel() for p in model.parameters())
    timer.session.say(f"{way}: building {count / 1e9:.2f}e9 parameters")
    shape = (options.micro_batches, options.sequences, options.tokens)
    torch.manual_seed(timer.world.rank)
    with timer.peak(f"{way}/memory", f"of steps, {EVERY_WAY[way].rule}") as peak:
        step = make_step(model, way, torch.randint(model.config.vocab_size, shape, device=timer.device))
        run = Told(timer.session, step)
        run.say(f"built in {time.perf_counter() - begin:.1f} s")
        rate = 1e3 * timer.world.world_size * math.prod(shape) / timer.time(run, from_idle=True)
    rule = "of the host, in use by rank 0: the peak of building and steps"
    timer.count(f"{way}/host", "megabytes", resident("VmHWM") / MEGABYTES, rule)
    timer.count(f"{way}/tokens", "tokens_per_second", rate, EVERY_WAY[way].rule)
    for n, loss in ((1, run.losses[0]), (len(run.losses), run.losses[-1])):
        timer.count(f"{way}/loss_{n}", "loss", loss, f"of step {n}, the same tokens in each")
    for megabytes in peak:
        rule = f"the peak over {count / 1e9:.2f}e9 parameters, activations included"
        timer.count(f"{way}/peak", "bytes_per_parameter", megabytes * MEGABYTES / count, rule)
    return rate


class Told:
    """A step that says what came of it."""

    def __init__(self, session: Session, step: Callable[[], torch.Tensor]):
        self._session, self._step, self.losses = session, step, []

    def __call__(self) -> None:
        begin = time.perf_counter()
        self.losses.append(self._step().item())
        seconds = time.perf_counter() - begin
        self.say(f"step {len(self.losses)}: loss {self.losses[-1]:.4f}, {seconds:.1f} s")

    def say(self, line: str) -> None:
        self._session.say(f"    {line}, {resident('VmRSS') / 1e9:.1f} GB of host memory")


def make_step(model: nn.Module, way: str, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """tokens: as of causal_step()."""
    model.train()
    if EVERY_WAY[way].on_meta:
        leave_meta(model, tokens.device)
    model, optimizer = EVERY_WAY[way].make(model)
    in_fp32 = next(model.parameters()).dtype == torch.float32
    context = functools.partial(torch.autocast, tokens.device.type, torch.bfloat16, enabled=in_fp32)
    return causal_step(model, optimizer, tokens, context)
