"""What the phases of an optimizer step of several ranks must move, in a rank's memory and on the way to
others, and how long that takes at least.

In the formulas W is the number of ranks, N of elements, n = N / W those that a rank owns, T the
tiles of 16 x 16 in all weights, and w the bytes of a gradient on its way. In a GPU's memory what lies between
two parameters counts as nothing, and so does what travels of amaxes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.ranks import Timer
from benchmarks.workloads import Shapes, elements_of, tiles_of


class Traffic(NamedTuple):
    """Bytes of a rank in a phase. formula: that of memory, in words. memory: what its GPU's memory reads and
    writes, for other ranks too. link: what it sends to other GPUs; as much arrives.
    """

    formula: str
    memory: float
    link: float = 0


Speeds = Mapping[str, float]
"""Bytes a second of a rank, by the fields of Traffic; of a link where there are other GPUs."""


class Step(NamedTuple):
    """A step of ZeroFP4Optimizer with FusedAdamW of NVFP4 weights alone, sharded over ranks of one host.

    elements, tiles: of all weights. gradient_bytes: of an element as autograd makes it. transport,
    in_buckets: as describe() has them. sent: by what it is, bytes that a rank sends.
    """

    elements: int
    tiles: int
    ranks: int
    gradient_bytes: int
    transport: str
    in_buckets: bool
    sent: Mapping[str, float]


def step_of(shapes: Shapes, described: Mapping[str, Any]) -> Step:
    """Of all weights of an optimizer and its describe(). Raises ValueError if buckets do not travel alike."""
    ways = {(bucket["ranks"], bucket["gradients_travel_as"]) for bucket in described["buckets"]}
    if len(ways) != 1:
        raise ValueError(f"buckets travel in several ways: {sorted(ways)}")
    ((ranks, dtype),) = ways
    how = described["transport"], described["in_buckets"], described["bytes_sent"]
    return Step(elements_of(shapes), tiles_of(shapes), ranks, getattr(torch, dtype).itemsize, *how)


def phases(step: Step) -> dict[str, Traffic]:
    """By phase, what it moves. parts() says which phases a step, or a part of it, consists of.

    scan: a rank's gradients are looked through for a NaN or Inf, wN.
    reduce: gradients become means in the FP32 slice of their owner, 4n, and are read for it:
        "peer", wW by owned element: w of this rank's, w(W-1) of other ranks', as much as it serves to them;
        "collective", w(3W-2): the same, behind w(W-1) that are read to be sent and w(W-1) that arrive;
        "none", w: they are the rank's own. link: gradients.
    norm: squares of a rank's own gradients are added up, wN, where they are means.
    adamw: master and two moments are read and written, an FP32 gradient read, 28n.
    adamw_reducing: the same, but what reduce reads in place of the FP32 gradient: 24n and that.
    publish: masters become codes, 4.5n; amaxes of all tiles become scales of both sides, 6T; codes leave for
        every other rank and arrive from there, (W-1)n; all weights are transposed, N. link: amaxes and codes.
    publish_alone: the same where no update has left the amaxes: 4n + 4T/W more.
    """
    n, ranks, w = step.elements / step.ranks, step.ranks, step.gradient_bytes
    ways = {
        "none": (w, f"{w}n"),
        "collective": (w * (3 * ranks - 2), f"{w}(3W-2)n"),
        "peer": (w * ranks, f"{w}Wn"),
    }
    reading, words = ways[step.transport]
    travel, gather = step.sent["gradients"], step.sent["amaxes"] + step.sent["weights"]
    look = Traffic(f"{w}N", w * step.elements)
    codes = 4.5 * n + 6 * step.tiles + (ranks - 1) * n + step.elements
    publish = Traffic("4.5n + 6T + (W-1)n + N", codes, gather)
    amaxes = 4 * n + 4 * step.tiles / ranks
    return {
        "scan": look,
        "reduce": Traffic(f"4n + {words}", (4 + reading) * n, travel),
        "norm": look,
        "adamw": Traffic("28n", 28 * n),
        "adamw_reducing": Traffic(f"24n + {words}", (24 + reading) * n, travel),
        "publish": publish,
        "publish_alone": Traffic(f"4n + 4T/W + {publish.formula}", codes + amaxes, gather),
    }


def parts(step: Step) -> dict[str, tuple[str, ...]]:
    """By what `python -m benchmarks step` measures, its phases, one behind the other."""
    in_update = ("adamw_reducing", "publish")
    if step.ranks == 1 and step.in_buckets:  # the gradients are means, and their squares tell of a NaN
        found = {"step": ("scan", *in_update), "step_clipped": ("norm", *in_update), "update": in_update}
    else:
        clipped, update = ("scan", "reduce", "adamw", "publish"), ("adamw", "publish")
        found = {"step": ("scan", *in_update) if step.in_buckets else clipped, "step_clipped": clipped}
        found |= {"reduce": ("reduce",), "update": update}
    return found | {"publish": ("publish_alone",)}


# The floors of a step that was measured

SENT_BYTES = {"cuda": 2 << 30, "cpu": 4 << 20}
"""What a rank sends as its link is measured."""


def measure_speeds(timer: Timer) -> Speeds:
    """Of a copy within a GPU's memory, and of what every rank sends to all others at once, with a row."""
    memory, ranks = timer.session.copy_before * 1e9, timer.world.world_size
    if ranks == 1:
        return {"memory": memory}
    piece = SENT_BYTES[timer.device.type] // (ranks - 1)
    here, there = (torch.zeros(ranks * piece, dtype=torch.uint8, device=timer.device) for _ in range(2))
    link = (ranks - 1) * piece / timer.time(lambda: dist.all_to_all_single(there, here)) / 1e6
    rule = f"an all-to-all of {timer.world.backend}, {ranks - 1} x {piece / 1e6:,.0f} MB"
    timer.count("link", "gigabytes_per_second", link, rule)
    return {"memory": memory, "link": link * 1e9}


def count_floors(timer: Timer, step: Step, speeds: Speeds, measured: Mapping[str, float]) -> None:
    """Rows of the floors of a step's phases, and of its parts (`measured`: milliseconds) over theirs."""
    floors, of_parts = {}, parts(step)
    used = {phase for names in of_parts.values() for phase in names}
    for phase, traffic in ((phase, found) for phase, found in phases(step).items() if phase in used):
        times = {name: 1e3 * getattr(traffic, name) / speed for name, speed in speeds.items()}
        floors[phase] = max(times.values())  # memory and link work beside each other
        rule = f"memory: {traffic.formula} bytes, {traffic.memory / 1e9:.3g} GB, {times['memory']:.3g} ms"
        if traffic.link:
            rule += f"; link: {traffic.link / 1e9:.3g} GB, {times['link']:.3g} ms"
        timer.count(f"floor_{phase}", "milliseconds", floors[phase], rule)
    for part, names in of_parts.items():
        floor = sum(floors[phase] for phase in names)
        if len(names) > 1:
            rule = f"the sum of those of {', '.join(names)}"
            timer.count(f"floor_{part}", "milliseconds", floor, rule)
        rule = f"{part} over what its bytes take: {' + '.join(f'{p} {floors[p]:.3g}' for p in names)} ms"
        timer.count(f"{part}_over_floor", "ratio", measured[part] / floor, rule)
