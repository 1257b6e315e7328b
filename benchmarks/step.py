"""An optimizer step of several ranks and its parts, beside a bf16 step and the time that their bytes take."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.peers import flash_adamw, zero_redundancy
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Session
from benchmarks.traffic import Step, count_floors, measure_speeds, step_of
from benchmarks.workloads import ADAMW, Shapes, elements_of, parameters_of, weight_shapes
from zerofp4.launch import World
from zerofp4.layout import ceil_div
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

COMPARED = ("step", "step_clipped", "publish", "update")
PREFIXES = {"collective": "", "peer": "peer_"}
"""What the names of rows begin with, by transport."""
MAX_NORM = 1.0
PUBLICATION = ("amaxes", "cast", "weights", "transpose")
"""The phases behind an update."""


def step(session: Session, options: argparse.Namespace, world: World) -> None:
    """ZeroFP4Optimizer.step() with FusedAdamW, and a bf16 ZeRO-1 step.

    Both begin with gradients on every rank, and end with weights on every rank. Those of bf16 lie in one flat
    buffer, which its reduce-scatter needs no copy of; ours are where a backward pass leaves them.

    At scale 1 a world of one needs 105 GB for ours and 140 GB for bf16. What a GPU has no room for is left
    out, and said to be.
    """
    shapes = weight_shapes(options.scale)
    timer = Timer(session, world, options.repeats)
    # A world of one has no transport: its rows have the names of collectives.
    transports = options.transport if world.world_size > 1 else ["collective"]
    speeds, ours, needed = measure_speeds(timer), {}, bytes_of_ours(shapes, world.world_size)
    for transport in transports:
        if timer.has_room(f"{PREFIXES[transport]}step", needed):
            own = Ours(session, options, world, shapes, transport)
            found, traffic = own.measure()
            free_memory(session.device)
            found |= own.measure_publication()
            count_floors(own.timer, traffic, speeds, found)
            ours[transport] = own, found
        free_memory(session.device)
    theirs = measure_bf16(timer, shapes)
    for own, found in ours.values() if theirs else ():
        for part in COMPARED:
            rule = f"{part} of ours over that of bf16"
            own.timer.count(f"{part}_over_bf16", "ratio", found[part] / theirs[part], rule)
    if world.world_size == 1:
        return
    for name, milliseconds in measure_replicated(timer, shapes):
        for own, found in ours.values():
            rule = f"step of ours over step_{name}"
            own.timer.count(f"step_over_{name}", "ratio", found["step"] / milliseconds, rule)
    for own, _ in ours.values():
        free_memory(session.device)
        own.measure_compact(theirs)
        free_memory(session.device)
        own.measure_hiding(theirs and theirs["step"])


def bytes_of_ours(shapes: Shapes, ranks: int) -> float:
    """What a rank holds at least: by owned element 12 of masters and moments, and 4 of the FP32 slice that
    several ranks clip in; by element of all 3 of gradients and codes of both sides.
    """
    return ((16 if ranks > 1 else 12) / ranks + 3) * elements_of(shapes)


class Ours:
    """Steps of ZeroFP4Optimizer over weights of these shapes, one optimizer for each measurement."""

    def __init__(
        self, session: Session, options: argparse.Namespace, world: World, shapes: Shapes, transport: str
    ):
        self.timer, self.shapes = Timer(session, world, options.repeats, PREFIXES[transport]), shapes
        self.communication = {"transport": transport, "bucket_mb": options.bucket_mb}
        self.several = world.world_size > 1
        self.way = transport if self.several else "nothing travels"
        self.on_gpu = world.device.type == "cuda"

    def build(self, optimizer_class: type, overlap: str | None = None, **options):
        """An optimizer, and its parameters, which have no gradients."""
        communication = Communication(overlap=overlap, **self.communication)
        torch.manual_seed(0)
        parameters = parameters_of(self.shapes, self.timer.device)
        optimizer = ZeroFP4Optimizer(parameters, optimizer_class, communication=communication, **options)
        return optimizer, parameters

    def measure(self) -> tuple[dict[str, float], Step]:
        """Milliseconds by part, of all but the publication, and what a step moves."""
        timer, found = self.timer, {}
        optimizer, parameters = self.build(FusedAdamW, **ADAMW)
        with_gradients(parameters)
        shared, bucket_mb = (optimizer.describe()[name] for name in ("shared_bytes", "bucket_mb"))
        clip, clipped = partial(optimizer.clip_grad_norm_, MAX_NORM), partial(clip_and_step, optimizer)
        beside = "weights, gradients and state included"
        with torch.no_grad(), timer.peak("memory", beside, shared=shared) as peak:
            rule = f"ZeroFP4Optimizer.step() with FusedAdamW, {self.way}"
            found["step"] = timer.ms("step", optimizer.step, rule)
            if self.on_gpu:
                rule = "the same where GPUs have nothing to do before: what the host begins with counts"
                timer.ms("step_from_idle", optimizer.step, rule, from_idle=True)
            slices = self.several and not optimizer.describe()["in_buckets"]
        self.count_above("memory_above", peak, bucket_mb, parameters, slices)
        beside = "the same where gradients are clipped"
        with torch.no_grad(), timer.peak("memory_clipped", beside, shared=shared) as peak:
            found["step_clipped"] = timer.ms("step_clipped", clipped, "clip_grad_norm_ and step()")
            rule = "until the host is done, of step(), which waits for votes of ranks"
            timer.ms("host_step", optimizer.step, rule, of_host=True)
            begin = "reduced FP32 gradients" if self.several else "gradients as autograd made them"
            rule = f"step() behind clip_grad_norm_: from {begin} to weights on every rank, its vote included"
            found["update"] = timer.ms("update", optimizer.step, rule, before=clip)
            parts = {"scan": ["scan"]} | ({"reduce": ["gradients"]} if self.several else {})
            found |= timer.spans(lambda: (clipped(), optimizer.check()), **parts)
            rule = "a NaN or Inf in a rank's own gradients, without the vote, in a profile"
            timer.count("scan", "milliseconds", found["scan"], rule)
            if self.several:
                rule = "gradients to the FP32 slices, as clip_grad_norm_ reduces them, in a profile"
                timer.count("reduce", "milliseconds", found["reduce"], rule)
            for phase, nbytes in optimizer.describe()["bytes_sent"].items():
                rule = f"sent by a rank in a step, {len(optimizer.describe()['buckets'])} buckets"
                timer.count(f"sent_{phase}", "megabytes", nbytes / MEGABYTES, rule)
        self.count_above("memory_above_clipped", peak, bucket_mb, parameters, self.several)
        return found, step_of(self.shapes, optimizer.describe())

    def count_above(
        self, name: str, peak: list[float], bucket_mb: float, parameters: list[nn.Parameter], slices: bool
    ) -> None:
        """What a peak has above what must be there: its target is 1% of the masters and two buckets."""
        if not peak:
            return
        masters = 4 * elements_of(self.shapes) / self.timer.world.world_size / MEGABYTES
        given = sum(each.nbytes + each.grad.nbytes for each in parameters) / MEGABYTES
        above = peak[0] - given - (4 if slices else 3) * masters
        bucket = bucket_mb * 2**20 / MEGABYTES
        rule = "of the peak, above weights, gradients, masters, moments and FP32 slices"
        target = 0.01 * masters + 2 * bucket
        self.timer.count(name, "megabytes", above, rule, target=target)

    def measure_publication(self) -> dict[str, float]:
        """From masters to weights on every rank, behind an update of all masters that leaves no amaxes."""
        optimizer, parameters = self.build(torch.optim.SGD, lr=1e-4)
        with_gradients(parameters)
        with torch.no_grad():
            found = self.timer.spans(lambda: (optimizer.step(), optimizer.check()), publish=PUBLICATION)
        rule = "from masters to weights on every rank, amaxes included, behind torch's SGD, in a profile"
        self.timer.count("publish", "milliseconds", found["publish"], rule)
        return found

    def measure_compact(self, bf16: dict[str, float] | None) -> None:
        """Steps with compact state. bf16: milliseconds of theirs, None where there is nothing to compare."""
        optimizer, parameters = self.build(FusedAdamW, state="compact", **ADAMW)
        with_gradients(parameters)
        clipped = partial(clip_and_step, optimizer)
        beside = "weights, gradients and compact state included"
        with torch.no_grad(), self.timer.peak("memory_compact", beside):
            for name, run in (("step", optimizer.step), ("step_clipped", clipped)):
                found = self.timer.ms(f"{name}_compact", run, "the same with state='compact'")
                if bf16 is not None:
                    rule = f"{name} of ours with compact state over that of bf16"
                    self.timer.count(f"{name}_compact_over_bf16", "ratio", found / bf16[name], rule)

    def measure_hiding(self, bf16_step: float | None) -> None:
        """How much of a step is left behind a backward pass. bf16_step: milliseconds of one, or None."""
        optimizer, parameters = self.build(FusedAdamW, overlap="backward")
        passes = Passes(parameters, TOKENS[self.timer.device.type])

        def alone() -> None:
            optimizer.zero_grad()
            with optimizer.no_sync():
                passes.run()

        def with_step() -> None:
            optimizer.zero_grad()
            passes.run()
            optimizer.step()

        before, stepped = self.timer.in_turns(alone, with_step)
        rule = f"forward and backward passes of {len(self.shapes)} weights with {passes.tokens} tokens"
        self.timer.count("backward", "milliseconds", before, rule)
        rule = "the same, in turns, with overlap='backward' and step() behind them"
        self.timer.count("backward_step", "milliseconds", stepped, rule)
        del optimizer, parameters, passes, alone, with_step
        free_memory(self.timer.device)
        optimizer, parameters = self.build(FusedAdamW, overlap="update", state="compact", **ADAMW)
        passes = Passes(parameters, TOKENS[self.timer.device.type])
        with self.timer.peak("memory_updates", "with updates in backward passes, activations included"):
            rule = "passes with overlap='update' and compact state, whole steps included"
            updated = self.timer.ms("updates_step", lambda: (passes.run(), optimizer.step()), rule)
        ends = {"exposed_step": ("step() adds", stepped), "exposed_updates": ("updates add", updated)}
        for name, (what, after) in ends.items() if bf16_step is not None else ():
            rule = f"what {what} to the passes, gradients included, over the bf16 step"
            self.timer.count(f"{name}_over_bf16", "ratio", max(after - before, 0.0) / bf16_step, rule)


def clip_and_step(optimizer: ZeroFP4Optimizer) -> None:
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()


def with_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """By autograd, whose gradients the optimizer puts where they travel from."""
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, device=parameter.device, dtype=torch.bfloat16)
        torch.autograd.backward(parameter, gradient.mul_(1e-2))


# Backward passes that hide what travels

TOKENS = {"cuda": 2048, "cpu": 16}
"""With as many, the backward pass of all weights takes two H200s 4.7 times as long as the reduction alone."""


class Passes:
    """Forward and backward passes through layers beside one another, each of the same tokens."""

    def __init__(self, parameters: Sequence[nn.Parameter], tokens: int):
        options = {"device": parameters[0].device, "dtype": torch.bfloat16}
        shapes = [parameter.shape for parameter in parameters]
        self._parameters, self.tokens = parameters, tokens
        self._inputs = {k: torch.randn(tokens, k, **options).requires_grad_() for _, k in shapes}
        self._grads = {n: torch.randn(tokens, n, **options).mul_(1e-2) for n, _ in shapes}

    def run(self) -> None:
        for x in self._inputs.values():
            x.grad = None
        outputs = [F.linear(self._inputs[p.shape[1]], p) for p in self._parameters]
        torch.autograd.backward(outputs, [self._grads[y.shape[1]] for y in outputs])


# What ours is compared with


def measure_bf16(timer: Timer, shapes: Shapes) -> dict[str, float] | None:
    """The plainest bf16 ZeRO-1: one reduce-scatter, one fused AdamW, one all-gather, of which a world of one
    has AdamW alone. Milliseconds by part; None where there is no room for it.
    """
    world, device = timer.world, timer.device
    several = world.world_size > 1
    part = ceil_div(elements_of(shapes), 256 * world.world_size) * 256
    if not timer.has_room("step_bf16", (4 * world.world_size + 16 + 2 * several) * part):
        return None
    options = {"device": device, "dtype": torch.bfloat16}
    weights = torch.zeros(world.world_size * part, **options)
    gradients = torch.randn(world.world_size * part, **options).mul_(1e-2)
    reduced = torch.empty(part, **options) if several else gradients
    own = weights[world.rank * part : (world.rank + 1) * part]
    master = nn.Parameter(torch.zeros(part, device=device))
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], fused=True, **ADAMW)
    average = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce() -> None:
        if several:
            scatter(reduced, gradients, average)
        master.grad.copy_(reduced)

    def clip() -> None:
        total = torch.linalg.vector_norm(master.grad).square()
        dist.all_reduce(total)
        master.grad.mul_((MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))

    def publish() -> None:
        own.copy_(master)
        if several:
            gather(weights, own)

    def update() -> None:
        optimizer.step()
        publish()

    found = {}
    scattered, cast = ("reduce-scatter, ", "cast, all-gather") if several else ("", "cast")
    with torch.no_grad(), timer.peak("memory_bf16", "weights, gradients and state included"):
        rule = "those of reduce and of update, in bf16"
        found["step"] = timer.ms("step_bf16", lambda: (reduce(), update()), rule)
        rule, clipped = "the same with clipping", lambda: (reduce(), clip(), update())
        found["step_clipped"] = timer.ms("step_bf16_clipped", clipped, rule)
        found["reduce"] = timer.ms("reduce_bf16", reduce, f"{scattered}the slice to FP32")
        found["update"] = timer.ms("update_bf16", update, f"torch's fused AdamW, {cast}")
        found["publish"] = timer.ms("publish_bf16", publish, cast)
    return found


REPLICATED = {
    "zero_redundancy": (zero_redundancy, 8, "ZeroRedundancyOptimizer with fused AdamW in bf16, no masters"),
    "flash": (flash_adamw, 8, "FlashAdamW, whose state every rank has whole"),
}
"""What makes an optimizer of weights that DDP has on every rank; bytes of an element, at least; the rule."""


def measure_replicated(timer: Timer, shapes: Shapes) -> Iterator[tuple[str, float]]:
    """Names and milliseconds of steps behind one all-reduce of all gradients, which DDP sends in buckets."""
    options = {"device": timer.device, "dtype": torch.bfloat16}
    average = dist.ReduceOp.AVG if timer.device.type == "cuda" else dist.ReduceOp.SUM
    for name, (build, nbytes, rule) in REPLICATED.items():
        if not timer.has_room(f"step_{name}", nbytes * elements_of(shapes)):
            continue
        gradients = torch.randn(elements_of(shapes), **options).mul_(1e-2)
        parameters = [nn.Parameter(torch.randn(shape, **options)) for shape in shapes]
        for p, part in zip(parameters, gradients.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        try:
            optimizer = build(parameters, **ADAMW)
        except (ImportError, NotImplementedError) as error:
            timer.session.say(f"step_{name} is left out: {error}")
            continue

        def whole(gradients=gradients, optimizer=optimizer) -> None:
            dist.all_reduce(gradients, average)
            optimizer.step()

        with torch.no_grad(), timer.peak(f"memory_{name}", "weights, gradients and state included"):
            found = timer.ms(f"step_{name}", whole, f"all-reduce, {rule}")
        yield name, found
        del gradients, parameters, optimizer, whole, p, part
        free_memory(timer.device)
