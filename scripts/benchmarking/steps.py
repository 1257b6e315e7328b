"""An optimizer step of several ranks and its parts, beside a plain bf16 ZeRO-1 step of the same weights."""

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofp4
from benchmarking import timeline
from benchmarking.hiding import measure_hiding
from benchmarking.session import Session
from benchmarking.workloads import llama_sizes
from zerofp4.engine import Failures
from zerofp4.launch import World

ARGUMENTS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 1.0
MOST_HOST = 0.5  # milliseconds
WARM_UP = 3
MEGABYTES = 1e6
PREFIXES = {"collective": "", "peer": "peer_"}
TARGETS = {
    "collective": {"step": 0.72, "step_clipped": 0.78, "publish": 0.50, "update": 0.62},
    "peer": {"step": 0.42, "step_clipped": 0.60, "publish": 0.42, "update": 0.55},
}
"""By transport, what a part of a step may take of the same part of the bf16 step."""


def step(session: Session, options: argparse.Namespace, world: World) -> None:
    """ZeroFP4Optimizer.step() with FusedAdamW and its parts, and those of a bf16 ZeRO-1 step.

    Both begin with gradients on every rank, and end with weights on every rank. Those of bf16 lie in one flat
    buffer, which its reduce-scatter needs no copy of; ours are where a backward pass leaves them.
    """
    shapes = [shape for shape, is_weight in llama_sizes(options.scale) if is_weight]
    timer = Timer(session, world, options.repeats)
    if options.timeline and session.device.type == "cpu":
        raise SystemExit("scripts/bench.py step: --timeline draws what a GPU does, and this ran on the CPU")
    ours = {}
    for transport in options.transport:
        picture = f"timeline_{transport}_{world.world_size}_ranks.png" if options.timeline else None
        path = None if picture is None else options.output / picture
        ours[transport] = measure_ours(timer, shapes, options.bucket_mb, transport, path)
        free_memory(session.device)
    theirs = measure_bf16(timer, shapes)
    for transport, parts in ours.items():
        for part, most in TARGETS[transport].items():
            timer.ratio(PREFIXES[transport] + part, parts[part], theirs[part], most)
    for transport, parts in ours.items() if world.world_size > 1 else ():
        free_memory(timer.device)
        arguments = options.bucket_mb, transport, PREFIXES[transport], parts["reduce"]
        measure_hiding(timer, shapes, *arguments)


class Timer:
    """Times what all ranks do together: the longest of the ranks' times, and the median of those."""

    def __init__(self, session: Session, world: World, repeats: int):
        self.session, self.world, self.repeats = session, world, repeats
        self.device = session.device
        self.places = f"{world.world_size}x{self.device.type}"

    def ms(
        self,
        name: str,
        run: Callable[[], object],
        rule: str,
        *,
        parts: int = 1,
        after: Callable[[], object] | None = None,
    ) -> float:
        """parts: equal ones that `run` has, of which one is timed. after: what is done after each that
        counts, not timed, once the device is done.
        """
        times = []
        for index in range(WARM_UP + self.repeats):
            times.append(self._once(run) / parts)
            if after is not None and index >= WARM_UP:
                after()
        longest = torch.tensor(times[WARM_UP:], device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        found = statistics.median(longest.tolist())
        self.session.count(f"{name}/{self.places}", "milliseconds", found, rule)
        return found

    def host_ms(self, name: str, run: Callable[[], object], rule: str) -> None:
        """How long the host takes to queue what the device then does."""
        times = []
        for _ in range(WARM_UP + self.repeats):
            dist.barrier()
            self.session.clock.synchronize()
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        self.session.clock.synchronize()
        found, target = statistics.median(times[WARM_UP:]), MOST_HOST if self.device.type == "cuda" else None
        rule = f"median on rank 0 until all is queued, {rule}"
        self.session.count(f"{name}/{self.places}", "milliseconds", found, rule, target=target)

    def sizes(self, described: dict) -> None:
        """What optimizer.describe() says that a rank sends."""
        for phase, nbytes in described["bytes_sent"].items():
            rule = f"sent by a rank in a step, {len(described['buckets'])} buckets"
            self.session.count(f"sent_{phase}/{self.places}", "megabytes", nbytes / MEGABYTES, rule)

    def _once(self, run: Callable[[], object]) -> float:
        dist.barrier()
        self.session.clock.synchronize()
        if self.device.type == "cpu":
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        self.session.clock.synchronize()
        return begin.elapsed_time(end)

    def ratio(self, part: str, ours: float, theirs: float, most: float) -> None:
        rule = f"{part} of ours over that of bf16"
        target = most if self.device.type == "cuda" else None
        self.session.count(f"{part}_over_bf16/{self.places}", "ratio", ours / theirs, rule, target=target)

    @contextlib.contextmanager
    def peak(self, name: str, beside: str, before: int = 0, shared: int = 0) -> Iterator[None]:
        """Report the most memory that was allocated meanwhile. before: bytes of something else in it. shared:
        those that other ranks can access, which torch does not count.
        """
        if self.device.type == "cpu":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        held = (torch.cuda.max_memory_allocated(self.device) + shared - before) / MEGABYTES
        self.session.count(f"{name}/{self.places}", "megabytes", held, f"peak on rank 0, {beside}")


def measure_ours(
    timer: Timer, shapes: list[tuple[int, int]], bucket_mb: float | None, transport: str, picture: Path | None
) -> dict[str, float]:
    """picture: where a timeline of a step is drawn, if it is wanted."""
    torch.manual_seed(0)
    options = {"device": timer.device, "dtype": torch.bfloat16}
    parameters = []
    for shape in shapes:
        value = zerofp4.quantize(torch.randn(shape, **options), columnwise=True)
        parameters.append(nn.Parameter(value))
    optimizer = zerofp4.optim.ZeroFP4Optimizer(
        parameters,
        zerofp4.optim.FusedAdamW,
        transport=transport,
        bucket_mb=bucket_mb,
        capturable=True,
        **ARGUMENTS,
    )
    prefix = PREFIXES[transport]
    for parameter in parameters:  # by autograd, whose gradients the optimizer puts where they travel from
        torch.autograd.backward(parameter, torch.randn(parameter.shape, **options).mul_(1e-2))
    gradients = [parameter.grad for parameter in parameters]

    def clipped() -> None:
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()

    present = [True] * len(parameters)

    def behind_vote(reduce: bool) -> None:
        prepared = optimizer._prepare(gradients, reduce)
        if prepared is not None:
            optimizer._step_in_buckets(prepared, present)
            return
        if reduce:
            optimizer._reduce_gradients(gradients)
        optimizer._step_in_sequence(present, Failures())

    found, shared = {}, optimizer.describe()["shared_bytes"]
    beside = "weights, gradients and state included"
    with torch.no_grad(), timer.peak(f"{prefix}memory", beside, shared=shared):
        found["step"] = timer.ms(
            f"{prefix}step", optimizer.step, f"ZeroFP4Optimizer.step() with FusedAdamW, {transport}"
        )
    beside = "the same where gradients are clipped"
    with torch.no_grad(), timer.peak(f"{prefix}memory_clipped", beside, shared=shared):
        found["step_clipped"] = timer.ms(f"{prefix}step_clipped", clipped, "clip_grad_norm_ and step()")
        behind = "of what a step prepares and does after its vote"
        timer.host_ms(f"{prefix}host_step", lambda: behind_vote(True), behind)
        scan = "a NaN or Inf in a rank's own gradients, without the vote"
        timer.ms(f"{prefix}scan", lambda: optimizer._nonfinite.word(gradients), scan)
        reduce = "gradients to the FP32 slices, as clip_grad_norm_ reduces them"
        found["reduce"] = timer.ms(f"{prefix}reduce", lambda: optimizer._reduce_gradients(gradients), reduce)
        found["update"] = timer.ms(
            f"{prefix}update",
            lambda: behind_vote(False),
            "from reduced FP32 gradients to weights on every rank",
        )
        timer.sizes(optimizer.describe())
        publish = "from masters to weights on every rank, amaxes included"
        found["publish"] = timer.ms(f"{prefix}publish", optimizer._publish, publish)
        if picture is not None:
            draw_timeline(optimizer.step, picture, f"step(), {transport} transport, {timer.places}")
        if timer.device.type == "cuda" and timer.world.world_size > 1:
            measure_graph(timer, optimizer, prefix)
    return found


def measure_graph(timer: Timer, optimizer: zerofp4.optim.ZeroFP4Optimizer, prefix: str) -> None:
    timer.session.clock.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    timer.ms(f"{prefix}graph_step", graph.replay, "step() replayed from a CUDA graph")
    timer.host_ms(f"{prefix}host_graph_step", graph.replay, "of such a replay")


def draw_timeline(run: Callable[[], object], path: Path, title: str) -> None:
    """Of rank 0; the others take part."""
    found = timeline.record(run)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = timeline.draw(found, path, title)
        print("no timeline without matplotlib" if drawn is None else f"wrote {drawn}", flush=True)


def measure_bf16(timer: Timer, shapes: list[tuple[int, int]]) -> dict[str, float]:
    """What the plainest bf16 ZeRO-1 does: one reduce-scatter, one fused AdamW, one all-gather."""
    world, device = timer.world, timer.device
    numel = sum(rows * cols for rows, cols in shapes)
    part = -(-numel // (256 * world.world_size)) * 256
    options = {"device": device, "dtype": torch.bfloat16}
    weights = torch.zeros(world.world_size * part, **options)
    gradients = torch.randn(world.world_size * part, **options).mul_(1e-2)
    reduced = torch.empty(part, **options)
    own = weights[world.rank * part : (world.rank + 1) * part]
    master = nn.Parameter(torch.zeros(part, device=device))
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], fused=True, **ARGUMENTS)
    average = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce() -> None:
        scatter(reduced, gradients, average)
        master.grad.copy_(reduced)

    def clip() -> None:
        total = torch.linalg.vector_norm(master.grad).square()
        dist.all_reduce(total)
        master.grad.mul_((MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))

    def publish() -> None:
        own.copy_(master)
        gather(weights, own)

    def update() -> None:
        optimizer.step()
        publish()

    def whole() -> None:
        reduce()
        update()

    def clipped() -> None:
        reduce()
        clip()
        update()

    found = {}
    with torch.no_grad(), timer.peak("memory_bf16", "weights, gradients and state included"):
        found["step"] = timer.ms(
            "step_bf16", whole, "reduce-scatter, torch's fused AdamW, all-gather, in bf16"
        )
        found["step_clipped"] = timer.ms("step_bf16_clipped", clipped, "the same with clipping")
        found["reduce"] = timer.ms("reduce_bf16", reduce, "reduce-scatter, and the slice to FP32")
        found["update"] = timer.ms("update_bf16", update, "torch's fused AdamW, cast, all-gather")
        found["publish"] = timer.ms("publish_bf16", publish, "cast and all-gather")
    return found


def free_memory(device: torch.device) -> int:
    """What is allocated once the model of before is gone, which is full of cycles."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def only_rank_0_speaks(world: World) -> Iterator[None]:
    if world.rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
    sys.stdout.flush()
