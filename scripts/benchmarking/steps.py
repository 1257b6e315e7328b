"""An optimizer step of several ranks and its parts, beside other ways and the time that their bytes take."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofp4
from benchmarking import timeline
from benchmarking.bf16 import ARGUMENTS, MAX_NORM, measure_bf16
from benchmarking.floors import count_floors, measure_speeds
from benchmarking.hiding import measure_hiding
from benchmarking.session import Session
from benchmarking.timer import MEGABYTES, Timer, free_memory
from benchmarking.traffic import Speeds, elements_of
from benchmarking.workloads import llama_sizes
from benchmarking.zero_redundancy import measure_zero_redundancy
from zerofp4.distributed import OwnError
from zerofp4.launch import World

PREFIXES = {"collective": "", "peer": "peer_"}
COMPARED = ("step", "step_clipped", "publish", "update")
TARGETS = {
    (2, "collective"): {"step": 0.72, "step_clipped": 0.78, "publish": 0.50, "update": 0.62},
    (2, "peer"): {"step": 0.42, "step_clipped": 0.60, "publish": 0.42, "update": 0.55},
    (4, "peer"): {"step": 0.52, "publish": 0.32, "update": 0.42},
}
"""By number of GPUs and transport, what a part of a step may take of the same part of the bf16 step."""


def step(session: Session, options: argparse.Namespace, world: World) -> None:
    """ZeroFP4Optimizer.step() with FusedAdamW, a bf16 ZeRO-1 step and torch's ZeroRedundancyOptimizer.

    All begin with gradients on every rank, and end with weights on every rank. Those of bf16 lie in one flat
    buffer, which its reduce-scatter needs no copy of; ours are where a backward pass leaves them.

    At scale 1 a world of one needs 105 GB for ours and 140 GB for bf16. What a GPU has no room for is left
    out, and said to be.
    """
    shapes = [shape for shape, is_weight in llama_sizes(options.scale) if is_weight]
    timer = Timer(session, world, options.repeats)
    if options.timeline and session.device.type == "cpu":
        raise SystemExit("scripts/bench.py step: --timeline draws what a GPU does, and this ran on the CPU")
    transports = options.transport
    if world.world_size == 1:
        session.say("a world of one has no transport: one step is measured, under the names of collectives")
        transports = ["collective"]
    speeds = measure_speeds(timer)
    ours = {}
    for transport in transports:
        picture = f"timeline_{transport}_{world.world_size}_ranks.png" if options.timeline else None
        path = None if picture is None else options.output / picture
        if timer.has_room(f"{PREFIXES[transport]}step", _bytes_of_ours(shapes, world.world_size)):
            ours[transport] = measure_ours(timer, shapes, options.bucket_mb, transport, path, speeds)
        free_memory(session.device)
    theirs = measure_bf16(timer, shapes)
    for transport, parts in ours.items() if theirs else ():
        targets = TARGETS.get((world.world_size, transport), {})
        for part in COMPARED:
            timer.ratio(PREFIXES[transport] + part, parts[part], theirs[part], targets.get(part))
    for transport, parts in ours.items() if world.world_size > 1 else ():
        free_memory(timer.device)
        prefix, bf16_step = PREFIXES[transport], theirs and theirs["step"]
        measure_hiding(timer, shapes, options.bucket_mb, transport, prefix, parts["reduce"], bf16_step)
    free_memory(timer.device)
    steps = {f"{PREFIXES[transport]}step": parts["step"] for transport, parts in ours.items()}
    measure_zero_redundancy(timer, shapes, steps)


def _bytes_of_ours(shapes: list[tuple[int, int]], ranks: int) -> float:
    """What a rank holds at least: by owned element 12 of masters and moments, and 4 of the FP32 slice that
    several ranks clip in; by element of all 3 of gradients and codes of both sides.
    """
    return ((16 if ranks > 1 else 12) / ranks + 3) * elements_of(shapes)


def measure_ours(
    timer: Timer,
    shapes: list[tuple[int, int]],
    bucket_mb: float | None,
    transport: str,
    picture: Path | None,
    speeds: Speeds,
) -> dict[str, float]:
    """Milliseconds by part. picture: where a timeline of a step is drawn, if it is wanted."""
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
        optimizer._step_in_sequence(present, OwnError())

    described = optimizer.describe()
    found, shared = {}, described["shared_bytes"]
    several = timer.world.world_size > 1
    beside = "weights, gradients and state included"
    with torch.no_grad(), timer.peak(f"{prefix}memory", beside, shared=shared) as peak:
        way = transport if several else "nothing travels"
        rule = f"ZeroFP4Optimizer.step() with FusedAdamW, {way}"
        found["step"] = timer.ms(f"{prefix}step", optimizer.step, rule)
        if timer.device.type == "cuda":
            rule = "the same where GPUs have nothing to do before: what the host begins with counts"
            timer.ms(f"{prefix}step_from_idle", optimizer.step, rule, from_idle=True)
    count_above(timer, f"{prefix}memory_above", peak, optimizer, gradients)
    beside = "the same where gradients are clipped"
    with torch.no_grad(), timer.peak(f"{prefix}memory_clipped", beside, shared=shared) as peak_clipped:
        found["step_clipped"] = timer.ms(f"{prefix}step_clipped", clipped, "clip_grad_norm_ and step()")
        behind = "of what a step prepares and does after its vote"
        timer.host_ms(f"{prefix}host_step", lambda: behind_vote(True), behind)
        nonfinite = optimizer._nonfinite
        scan = "a NaN or Inf in a rank's own gradients, without the vote"
        timer.ms(f"{prefix}scan", lambda: nonfinite.word(gradients), scan)
        if several:
            rule = "gradients to the FP32 slices, as clip_grad_norm_ reduces them"
            found["reduce"] = timer.ms(
                f"{prefix}reduce", lambda: optimizer._reduce_gradients(gradients), rule
            )
        begin = "reduced FP32 gradients" if several else "gradients as autograd made them"
        rule = f"from {begin} to weights on every rank"
        found["update"] = timer.ms(f"{prefix}update", lambda: behind_vote(False), rule)
        timer.sizes(prefix, described)
        publish = "from masters to weights on every rank, amaxes included"
        found["publish"] = timer.ms(f"{prefix}publish", optimizer._publish, publish)
        if several:
            rule = "codes of all buckets from their owners to every rank, nothing else"
            found["gather"] = timer.ms(f"{prefix}gather", lambda: gather(optimizer), rule)
        if picture is not None:
            draw_timeline(optimizer.step, picture, f"step(), {transport} transport, {timer.places}")
        if timer.device.type == "cuda" and several:
            measure_graph(timer, optimizer, prefix)
        count_floors(timer, shapes, optimizer.describe(), speeds, prefix, found)
    count_above(timer, f"{prefix}memory_above_clipped", peak_clipped, optimizer, gradients)
    return found


def count_above(
    timer: Timer,
    name: str,
    peak: list[float],
    optimizer: zerofp4.optim.ZeroFP4Optimizer,
    gradients: list[torch.Tensor],
) -> None:
    """What is left of a peak without weights, gradients, masters and AdamW's moments, and the FP32 slices
    where there are such: at most 1% of the masters and two buckets, if it is to meet its target.
    """
    if not peak:
        return
    buffers = optimizer._shards.buffers
    masters = sum(buffer.masters.nbytes for buffer in buffers) / MEGABYTES
    slices = sum(buffer.gradients.nbytes for buffer in buffers if buffer.has_gradients) / MEGABYTES
    given = sum(tensor.nbytes for tensor in (*optimizer._shards.parameters, *gradients)) / MEGABYTES
    above = peak[0] - given - 3 * masters - slices
    bucket = optimizer.describe()["bucket_mb"] * 2**20 / MEGABYTES
    rule = "of the peak, above weights, gradients, masters, moments and FP32 slices"
    timer.session.count(
        f"{name}/{timer.places}", "megabytes", above, rule, target=0.01 * masters + 2 * bucket
    )


def gather(optimizer: zerofp4.optim.ZeroFP4Optimizer) -> None:
    """As a publication gathers codes that are there."""
    if optimizer._peers is not None:
        optimizer._peers.open()
    for travelling in [buffer.start_gather() for buffer in optimizer._shards.buffers]:
        travelling.wait()


def measure_graph(timer: Timer, optimizer: zerofp4.optim.ZeroFP4Optimizer, prefix: str) -> None:
    optimizer.step()  # one as it is captured: without clipping
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
