"""Training steps of FSDP2 with gathers in 4 bits, beside those of fully_shard with bfloat16 parameters."""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn import functional as F

from benchmarking.session import Session
from benchmarking.steps import MEGABYTES, Timer
from zerofp4.integrations import fsdp2 as integration
from zerofp4.launch import World
from zerofp4.tensors import NVFP4Tensor

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 4096, 14336, 32, 8  # of Llama-3-8B
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KEEPS = {"reshard": True, "keep": False}
"""What reshard_after_forward is, by what rows call it."""
GATHER, STEP, PEAK = 0.35, 1.0, {"reshard": 1.03, "keep": 0.95}
RESIDENT = 0.51
"""Bytes of a converted parameter of which rows and scales are there."""


class Block(nn.Module):
    """A layer of Llama-3-8B without rotations, its dimensions divided by `scale`."""

    def __init__(self, scale: int):
        super().__init__()
        hidden, intermediate = HIDDEN // scale, INTERMEDIATE // scale
        self.heads = max(HEADS // scale, KV_HEADS), KV_HEADS
        kv = hidden // self.heads[0] * KV_HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.query, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norms[0](x)
        sizes = zip((self.query, self.key, self.value), (self.heads[0], *self.heads[1:] * 2), strict=True)
        query, key, value = (
            layer(given).unflatten(-1, (heads, -1)).transpose(-3, -2) for layer, heads in sizes
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(-3, -2).flatten(-2))
        given = self.norms[1](x)
        return x + self.down(F.silu(self.gate(given)) * self.up(given))


class TimedGather(DefaultAllGather):
    """torch's all-gather, which says how long it took on its stream, and counts what it brought."""

    def __init__(self):
        self.bytes = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any):
        self.bytes += output_tensor.nbytes
        if not output_tensor.is_cuda:
            return super().__call__(output_tensor, *args, **kwargs)
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        events[0].record()
        work = super().__call__(output_tensor, *args, **kwargs)
        events[1].record()
        self._events.append(events)
        return work

    def take(self) -> tuple[float, int]:
        """Milliseconds and bytes since the last time. Waits for the device."""
        for _, end in self._events:
            end.synchronize()
        found = sum(begin.elapsed_time(end) for begin, end in self._events), self.bytes
        self._events, self.bytes = [], 0
        return found


def fsdp2(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of a sharded model of Llama-3-8B's layers, gathered in 4 bits and in bf16, resharded or kept.

    FP32 masters, bf16 parameters and products, gradients reduced in FP32, torch's fused AdamW. `gather` is
    the time in the all-gathers of the layers, their streams' own, in one step on rank 0.
    """
    timer = Timer(session, world, options.repeats)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for keep in KEEPS:
        ours = measure(timer, options, mesh, keep, is_ours=True)
        theirs = measure(timer, options, mesh, keep, is_ours=False)
        for part, most in (("step", STEP), ("gather", GATHER), ("peak", PEAK[keep])):
            if ours.get(part) and theirs.get(part):
                timer.ratio(f"{keep}/{part}", ours[part], theirs[part], most)


def measure(
    timer: Timer, options: argparse.Namespace, mesh: DeviceMesh, keep: str, *, is_ours: bool
) -> dict[str, float]:
    session, world = timer.session, timer.world
    gc.collect()  # the model of the last call is full of cycles
    if session.clock.is_cuda:
        torch.cuda.empty_cache()
    name = keep if is_ours else f"{keep}_bf16"
    torch.manual_seed(0)
    with world.device:
        model = nn.Sequential(*(Block(options.scale) for _ in range(options.layers)))
        x = torch.randn(1, options.tokens, HIDDEN // options.scale, dtype=torch.bfloat16)
    gather = TimedGather()
    if is_ours:
        integration.prepare(model)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=POLICY, reshard_after_forward=KEEPS[keep])
        block.set_custom_all_gather(gather)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=KEEPS[keep])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if is_ours:
        integration.attach(model, optimizer)
    gathers = []

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(gather.take())

    found = {}
    if session.clock.is_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    how = "gathered in 4 bits" if is_ours else "gathered in bfloat16"
    found["step"] = timer.ms(f"{name}/step", step, f"forward, backward and optimizer, {how}")
    tokens = options.tokens * world.world_size / (found["step"] / 1e3)
    session.count(f"{name}/tokens/{timer.places}", "tokens_per_second", tokens, f"of all ranks, {how}")
    if session.clock.is_cuda:
        times = sorted(ms for ms, _ in gathers[1:])
        found["gather"] = times[len(times) // 2]
        rule = f"in the all-gathers of a step, {how}"
        session.count(f"{name}/gather/{timer.places}", "milliseconds", found["gather"], rule)
        found["peak"] = torch.cuda.max_memory_allocated(world.device) / MEGABYTES
        session.count(f"{name}/peak/{timer.places}", "megabytes", found["peak"], f"allocated, {how}")
    rule = f"brought to each rank by the all-gathers of a step, {how}"
    session.count(f"{name}/gathered/{timer.places}", "megabytes", gathers[-1][1] / MEGABYTES, rule)
    if is_ours:
        count_resident(timer, model, x, f"{name}/resident")
    return found


def count_resident(timer: Timer, model: nn.Module, x: torch.Tensor, name: str) -> None:
    """Bytes of the tensors that layers multiply, while all of them are gathered."""
    for block in model:
        block.unshard()
    weights = [p for p in model.parameters() if isinstance(p, NVFP4Tensor)]
    elements = sum(weight.numel() for weight in weights)
    held = sum(weight.nbytes for weight in weights)
    for block in model:
        block.reshard()
    rule = "codes and scales of gathered weights, rows only"
    target = RESIDENT if timer.session.clock.is_cuda else None
    timer.session.count(f"{name}/{timer.places}", "bytes_per_parameter", held / elements, rule, target=target)


def draw(folder: Path, result: dict) -> Path | None:
    """The picture of a result: ours over bf16, in bars; None without matplotlib or where there is nothing to
    draw.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    rows = [row for row in result["rows"] if "_over_bf16/" in row["name"]]
    if not rows:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.4))
    names = [row["name"].rpartition("/")[0].replace("_over_bf16", "").replace("/", ", ") for row in rows]
    bars = axes.barh(names[::-1], [row["ratio"] for row in rows][::-1], color="#1f5fa8", height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="#b9bec6")
    axes.set_xlabel(f"of what fully_shard takes with bf16 parameters, {result['device']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path = folder / f"{result['benchmark']}.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
