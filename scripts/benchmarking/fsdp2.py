"""Training steps of FSDP2 with gathers in 4 bits, beside those of fully_shard with bfloat16 parameters."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import zerofp4
from benchmarking.decoder import LLAMA_8B, QWEN_1_5B, Decoder, Shape
from benchmarking.session import Session
from benchmarking.timeline import record
from benchmarking.timer import MEGABYTES, Timer, free_memory
from zerofp4.integrations import fsdp2 as integration
from zerofp4.launch import World

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 4
"""That follow each other without waiting for the device, as in training: what is timed at once."""

CASES = {"reshard": (LLAMA_8B, True), "keep": (LLAMA_8B, False), "1.5b": (QWEN_1_5B, True)}
"""The model and its reshard_after_forward, by what rows call both."""

TARGETS = {
    "reshard/gather": 0.35,
    "reshard/tokens": 1.0,
    "reshard/peak": 1.03,
    "keep/gather": 0.35,
    "keep/peak": 0.95,
}
RESIDENT = {"rows": 0.51, "rows_and_columns": 1.02}
"""Bytes of a converted parameter while it is gathered."""


class TimedGather(DefaultAllGather):
    """torch's all-gather, which says how long each took on its stream, and counts what they brought. calls:
    what is to know in which order several of them were called.
    """

    def __init__(self, calls: list["TimedGather"]):
        self.bytes = 0
        self._calls = calls
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any):
        self.bytes += output_tensor.nbytes
        self._calls.append(self)
        if not output_tensor.is_cuda:
            return super().__call__(output_tensor, *args, **kwargs)
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        events[0].record()
        work = super().__call__(output_tensor, *args, **kwargs)
        events[1].record()
        self._events.append(events)
        return work

    def clear(self) -> None:
        self._events, self.bytes = [], 0

    def milliseconds(self) -> float:
        """All of them together, from when the stream came to each until it was done. The device is done with
        them.
        """
        return where_last([begin.elapsed_time(end) for begin, end in self._events])


def where_last(times: list[float]) -> float:
    """The sum of the times of collectives, each on the rank that came to it last: the others' times have
    their waiting in them.
    """
    if not times:
        return 0.0
    shortest = torch.tensor(times, dtype=torch.float64, device="cuda")
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    return shortest.sum().item()


def in_kernels(run: Callable[[], object], calls: list[TimedGather], gather: TimedGather) -> float:
    """Milliseconds that NCCL's kernels of one of the gathers take in one call of run(). Raises RuntimeError
    where the profiler has not seen one kernel for each of all calls.
    """
    spans = [span for span in record(run) if "AllGather" in span.name]
    if len(spans) != len(calls):
        raise RuntimeError(f"{len(calls)} all-gathers, and {len(spans)} kernels of NCCL that are ones")
    return where_last([span.ms for span, call in zip(spans, calls, strict=True) if call is gather])


def fsdp2(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of a sharded model of Llama-3-8B's layers, gathered in 4 bits and in bf16, resharded or kept.

    FP32 masters, bf16 parameters and products, gradients reduced in FP32, torch's fused AdamW. `gather` is
    the time that NCCL's kernels take for the all-gathers of the layers in one step, from a profile.
    `gather_stream` is the time from when their stream comes to each until it is done, in which it waits for
    the host and for multiprocessors that products use, and `gather_total` the same of all parameters. 1.5b is
    a whole model of smaller layers.
    """
    timer = Timer(session, world, options.repeats)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    for case, (shape, reshards) in CASES.items():
        shape = shape.reduced(options.scale, options.layers)
        ours = measure(timer, options.tokens, mesh, case, shape, reshards, is_ours=True)
        theirs = measure(timer, options.tokens, mesh, case, shape, reshards, is_ours=False)
        compare(timer, case, ours, theirs)
    count_resident(timer, mesh, LLAMA_8B.reduced(options.scale, 1))


def measure(
    timer: Timer, tokens: int, mesh: DeviceMesh, case: str, shape: Shape, reshards: bool, *, is_ours: bool
) -> dict[str, float]:
    """Adds the rows of one model, and returns what is to be compared."""
    device, is_cuda = timer.device, timer.session.clock.is_cuda
    name, how = (case, "gathered in 4 bits") if is_ours else (f"{case}_bf16", "gathered in bfloat16")
    before = free_memory(device)
    torch.manual_seed(0)
    with device:
        model = Decoder(shape)
    x = batch_of(shape, tokens, device)
    calls: list[TimedGather] = []
    blocks, others = TimedGather(calls), TimedGather(calls)
    optimizer = shard(model, mesh, reshards, is_ours)
    for block in model.blocks:
        block.set_custom_all_gather(blocks)
    model.set_custom_all_gather(others)
    times: list[tuple[float, float]] = []

    def steps() -> None:
        blocks.clear(), others.clear(), calls.clear()
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def note() -> None:
        times.append((blocks.milliseconds() / STEPS, others.milliseconds() / STEPS))

    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    rule = f"forward, backward and optimizer, {how}, one of {STEPS} that follow each other"
    step = timer.ms(f"{name}/step", steps, rule, parts=STEPS, after=note)

    def count(part: str, kind: str, value: float, rule: str) -> float:
        timer.session.count(f"{name}/{part}/{timer.places}", kind, value, f"{rule}, {how}")
        return value

    rate = tokens * timer.world.world_size / (step / 1e3)
    found = {"tokens": count("tokens", "tokens_per_second", rate, "of all ranks")}
    if is_cuda:
        peak = (torch.cuda.max_memory_allocated(device) - before) / MEGABYTES
        found["peak"] = count("peak", "megabytes", peak, "allocated for model, optimizer and steps")
        of_blocks = in_kernels(steps, calls, blocks) / STEPS if timer.world.world_size > 1 else 0.0
        rule = "in NCCL's kernels for the layers in a step, without waiting for other ranks"
        found["gather"] = count("gather", "milliseconds", of_blocks, rule)
        on_stream = statistics.median(part for part, _ in times)
        rule = "from when the stream comes to such an all-gather until it is done"
        found["gather_stream"] = count("gather_stream", "milliseconds", on_stream, rule)
        if shape.vocabulary:
            of_all = statistics.median(map(sum, times))
            found["gather_total"] = count(
                "gather_total", "milliseconds", of_all, "the same of all parameters"
            )
    rule = "brought to each rank by the all-gathers of the layers in a step"
    found["gathered"] = count("gathered", "megabytes", blocks.bytes / STEPS / MEGABYTES, rule)
    return found


def batch_of(shape: Shape, tokens: int, device: torch.device) -> torch.Tensor:
    if shape.vocabulary:
        return torch.randint(shape.vocabulary, (1, tokens), device=device)
    return torch.randn(1, tokens, shape.hidden, device=device, dtype=torch.bfloat16)


def shard(model: Decoder, mesh: DeviceMesh, reshards: bool, is_ours: bool) -> torch.optim.Optimizer:
    if is_ours:
        integration.prepare(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if is_ours:
        integration.attach(model, optimizer)
    return optimizer


def compare(timer: Timer, case: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
    for part in (part for part in ours if theirs[part]):  # one rank alone gathers nothing
        target = TARGETS.get(f"{case}/{part}") if timer.session.clock.is_cuda else None
        kind, rule = "ratio", f"{part} of ours over that of bf16"
        if part == "tokens":
            kind, rule = "speedup", "tokens a second of ours over those of bf16"
        name, value = f"{case}/{part}_over_bf16/{timer.places}", ours[part] / theirs[part]
        timer.session.count(name, kind, value, rule, target=target)


def count_resident(timer: Timer, mesh: DeviceMesh, shape: Shape) -> None:
    """What layers multiply, while it is gathered: of torch's linear layers, of ours, and of bf16."""
    is_cuda = timer.session.clock.is_cuda
    for name, linear in (("rows", nn.Linear), ("rows_and_columns", zerofp4.nn.Linear), ("bf16", nn.Linear)):
        free_memory(timer.device)
        with timer.device:
            model = Decoder(shape, linear)
        optimizer = shard(model, mesh, False, name in RESIDENT)
        block = model.blocks[0]
        sharded = free_memory(timer.device)
        block.unshard()
        gathered = free_memory(timer.device)
        weights = [p for p in block.parameters() if p.dim() == 2]
        numel = sum(weight.numel() for weight in weights)

        def count(part: str, held: int, rule: str, target: float | None = None) -> None:
            place = f"{part}/{name}/{timer.places}"  # noqa: B023
            timer.session.count(place, "bytes_per_parameter", held / numel, rule, target=target)  # noqa: B023

        target = RESIDENT.get(name) if is_cuda else None
        rule = "gathered weights: codes and scales" if name in RESIDENT else "gathered weights in bfloat16"
        count("resident", sum(weight.nbytes for weight in weights), rule, target)
        if is_cuda:
            count("allocated", gathered - sharded, "what a gather allocates until resharding: no scales")
        block.reshard()
        del model, block, optimizer, weights
