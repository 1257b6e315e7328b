"""What the phases of an optimizer step of several ranks must move, in a rank's memory and on the way to
others: how long they take at least, and what steps of other numbers of GPUs would take.

In the formulas W is the number of ranks, H of hosts, N of elements, n = N / W those that a rank owns, T the
tiles of 16 x 16 in all weights, and w the bytes of a gradient on its way. In a GPU's memory what lies between
two parameters counts as nothing, and so does what travels of amaxes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4_bench.ranks import Timer
from zerofp4_bench.workloads import Shapes, elements_of, tiles_of, weight_shapes


class Traffic(NamedTuple):
    """Bytes of a rank in a phase. formula: that of memory, in words. memory: what its GPU's memory reads and
    writes, with what it serves to other ranks and what they write there. link, network: what it sends to
    other GPUs of its host and to other hosts; as much arrives.
    """

    formula: str
    memory: float
    link: float = 0
    network: float = 0


class Speeds(NamedTuple):
    """Bytes a second, of a rank: of its memory, read and written, as a copy within it has them; of what it
    sends to other GPUs of its host and to other hosts, None where there are none.
    """

    memory: float
    link: float | None = None
    network: float | None = None

    def milliseconds(self, traffic: Traffic) -> dict[str, float]:
        """Of a phase, what each of them takes that has something to do."""
        return {
            name: 1e3 * getattr(traffic, name) / getattr(self, name)
            for name in self._fields
            if getattr(traffic, name)
        }

    def floor(self, traffic: Traffic) -> float:
        """Milliseconds that a phase takes at least: the longest of these, which work beside each other."""
        return max(self.milliseconds(traffic).values(), default=0.0)


class Step(NamedTuple):
    """A step of ZeroFP4Optimizer with FusedAdamW of NVFP4 weights alone.

    elements, tiles: of all weights. gradient_bytes: of an element as autograd makes it. transport,
    in_buckets: as describe() has them, or a transport that phases() names. sent: by what it is, bytes that a
    rank sends. hosts: how many. across: those of `sent` that go to other hosts.
    """

    elements: int
    tiles: int
    ranks: int
    gradient_bytes: int
    transport: str
    in_buckets: bool
    sent: Mapping[str, float]
    hosts: int = 1
    across: Mapping[str, float] | None = None

    @property
    def owned(self) -> float:
        return self.elements / self.ranks


def step_of(shapes: Shapes, described: Mapping[str, Any]) -> Step:
    """Of all weights of an optimizer, sharded over ranks of one host, and its describe().

    Raises ValueError for buckets that do not travel alike.
    """
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
        "none", w: they are the rank's own;
        "hosts", wW + 16H - 8: on each host as "peer"; H FP32 means are written there, H - 1 of them read to
        be sent, as many arrive, and their owner reads one of each host;
        "reduce_scatter", 3wW: read; sums arrive, are read and leave; the mean is written, and read.
        link, network: gradients.
    norm: squares of a rank's own gradients are added up, wN, where they are means.
    adamw: master and two moments are read and written, an FP32 gradient read, 28n.
    adamw_reducing: the same, but what reduce reads in place of the FP32 gradient: 24n and that.
    publish: masters become codes, 4.5n; amaxes of all tiles become scales of both sides, 6T; codes leave for
        every other rank and arrive from there, (W-1)n; all weights are transposed, N. link, network: amaxes
        and codes.
    publish_alone: the same where no update has left the amaxes: 4n + 4T/W more.
    """
    n, ranks, w = step.owned, step.ranks, step.gradient_bytes
    ways = {
        "none": (w, f"{w}n"),
        "collective": (w * (3 * ranks - 2), f"{w}(3W-2)n"),
        "peer": (w * ranks, f"{w}Wn"),
        "hosts": (w * ranks + 16 * step.hosts - 8, f"({w}W+16H-8)n"),
        "reduce_scatter": (3 * w * ranks, f"{3 * w}Wn"),
    }
    reading, words = ways[step.transport]
    travel, gather = sending(step, "gradients"), sending(step, "amaxes", "weights")
    codes = 4.5 * n + 6 * step.tiles + (ranks - 1) * n + step.elements
    words_of_codes = "4.5n + 6T + (W-1)n + N"
    amaxes = 4 * n + 4 * step.tiles / ranks
    return {
        "scan": Traffic(f"{w}N", w * step.elements),
        "reduce": Traffic(f"4n + {words}", (4 + reading) * n, *travel),
        "norm": Traffic(f"{w}N", w * step.elements),
        "adamw": Traffic("28n", 28 * n),
        "adamw_reducing": Traffic(f"24n + {words}", (24 + reading) * n, *travel),
        "publish": Traffic(words_of_codes, codes, *gather),
        "publish_alone": Traffic(f"4n + 4T/W + {words_of_codes}", codes + amaxes, *gather),
    }


def sending(step: Step, *kinds: str) -> tuple[float, float]:
    """What a rank sends of these kinds: to GPUs of its host, and to other hosts."""
    across = sum(step.across[kind] for kind in kinds) if step.across else 0
    return sum(step.sent[kind] for kind in kinds) - across, across


def parts(step: Step) -> dict[str, tuple[str, ...]]:
    """By what scripts/bench.py step measures, its phases, one behind the other."""
    if step.ranks == 1 and step.in_buckets:  # the gradients are means, and their squares tell of a NaN
        reduce, update = (), ("adamw_reducing", "publish")
        whole, clipped = ("scan", *update), ("norm", *update)
    else:
        reduce, update = ("reduce",), ("adamw", "publish")
        clipped = ("scan", *reduce, *update)
        whole = ("scan", "adamw_reducing", "publish") if step.in_buckets else clipped
    return {
        "step": whole,
        "step_clipped": clipped,
        "reduce": reduce,
        "update": update,
        "publish": ("publish_alone",),
    }


# The floors of a step that was measured

SENT_BYTES = {"cuda": 2 << 30, "cpu": 4 << 20}
"""What a rank sends as its link is measured."""


def measure_speeds(timer: Timer) -> Speeds:
    """Of a copy within a GPU's memory, as the session has measured it, and of what every rank sends to all
    others at once. A row says the latter.
    """
    memory, ranks = timer.session.copy_before * 1e9, timer.world.world_size
    if ranks == 1:
        return Speeds(memory)
    piece = SENT_BYTES[timer.device.type] // (ranks - 1)
    here, there = (torch.zeros(ranks * piece, dtype=torch.uint8, device=timer.device) for _ in range(2))
    link = (ranks - 1) * piece / timer.time(lambda: dist.all_to_all_single(there, here)) / 1e6
    rule = f"an all-to-all of {timer.world.backend}, {ranks - 1} x {piece / 1e6:,.0f} MB"
    timer.count("link", "gigabytes_per_second", link, rule)
    return Speeds(memory, link * 1e9)


def count_floors(timer: Timer, step: Step, speeds: Speeds, measured: Mapping[str, float]) -> None:
    """Rows of the floors of a step's phases, and of what its parts took over the sums of theirs.

    measured: milliseconds by part.
    """
    floors, of_parts = {}, {part: names for part, names in parts(step).items() if names}
    for phase, traffic in phases(step).items():
        if not any(phase in names for names in of_parts.values()):
            continue
        times = speeds.milliseconds(traffic)
        floors[phase] = speeds.floor(traffic)
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


# Steps of numbers of GPUs that are not there

GRADIENT_BYTES = 2
WAYS = {"collective": "", "peer": "peer_", "bf16": ""}
"""Of taking a step, with what the names of their rows begin with."""
PARTS = ("step", "step_clipped", "reduce", "update", "publish")
RANKS = (1, 2, 4, 8)
"""Numbers of GPUs of one host that are predicted."""

OF_HOST, HOST_GPUS, HOST_GBPS = 8, (8, 64, 512, 4096), (25, 50, 100)
"""GPUs of a host, and what is predicted: numbers of GPUs, and gigabytes a second that each sends to other
hosts.
"""
HOST_WAYS = dict.fromkeys(("default", "reduce_scatter", "collective"), "collective")
HOST_WAYS |= {"bf16": "bf16", "fsdp2": None}
"""Of taking a step on several hosts, with the way whose measured factor over the floor it gets."""
TARGET_GPUS, HOST_TARGETS = 64, {"default": 0.92, "reduce_scatter": 0.75}
"""A step's time with so many GPUs over that of bf16, at most."""


def phases_of(way: str, shapes: Shapes, ranks: int, of_host: int | None = None) -> dict[str, list[Traffic]]:
    """By part of a step, its phases in their order. of_host: as of planned()."""
    elements, of_host = elements_of(shapes), of_host or ranks
    if way == "fsdp2":
        found = fsdp2_phases(elements, ranks, of_host)
        of_parts = {"step": tuple(found)}
    elif way == "bf16":
        found, of_parts = bf16_phases(elements, ranks, of_host), bf16_parts(ranks)
    else:
        step = planned(shapes, ranks, way, of_host)
        found, of_parts = phases(step), parts(step)
    return {part: [found[name] for name in names] for part, names in of_parts.items()}


def planned(shapes: Shapes, ranks: int, way: str, of_host: int | None = None) -> Step:
    """A step of ranks that are not there, with bfloat16 gradients.

    way: how gradients travel. "collective", "peer": a rank sends 2n to every other rank. "reduce_scatter":
        2N around rings. "default": "peer" on one host; on several hosts a rank serves 2Hn to every other rank
        of its host, and sends an FP32 mean, 4n, to every other host.
    of_host: ranks of a host, which are numbered host by host; None where one host has all.

    Codes, half a byte of an element, are all-gathered around rings; amaxes, 2 bytes of a tile, all-reduced.
    """
    elements, tiles, of_host = elements_of(shapes), tiles_of(shapes), min(of_host or ranks, ranks)
    hosts, n = ranks // of_host, elements / ranks
    if way == "default":
        way = "hosts" if hosts > 1 else "peer"
    rings = {"amaxes": 2 * 2 * tiles, "weights": elements / 2}
    to_each = GRADIENT_BYTES * n
    sent, across = to_each * (ranks - 1), to_each * (ranks - of_host)
    if way == "hosts":
        across = 4 * n * (hosts - 1)
        sent = to_each * hosts * (of_host - 1) + across
    elif way == "reduce_scatter":
        rings["gradients"] = GRADIENT_BYTES * elements
    found = {kind: around(nbytes, ranks, of_host) for kind, nbytes in rings.items()}
    found.setdefault("gradients", (sent - across, across))
    return Step(
        elements,
        tiles,
        ranks,
        GRADIENT_BYTES,
        way if ranks > 1 else "none",
        True,
        {kind: sum(ways) for kind, ways in found.items()},
        hosts,
        {kind: network for kind, (_, network) in found.items()},
    )


def around(nbytes: float, ranks: int, of_host: int) -> tuple[float, float]:
    """Bytes that a rank sends to its host and to other hosts in an all-gather or reduce-scatter of `nbytes`.

    In a ring every rank sends all shares but one to the next rank. A ring through all ranks, host by host,
    leaves each host once. NCCL makes several rings, and each leaves a host from another GPU's network card:
    so 1/of_host of what a rank sends goes to another host.
    """
    sent = nbytes * (ranks - 1) / ranks
    across = sent / of_host if ranks > of_host else 0.0
    return sent - across, across


def bf16_phases(elements: int, ranks: int, of_host: int) -> dict[str, Traffic]:
    """Of the bf16 step, each behind the other. W ranks own n of N elements each.

    scatter: gradients read, 2N; sums arrive, are read, and leave, 4(W-1)n; the mean, 2n. widen: the slice
    becomes FP32, 6n. clip: read for its norm, read and written, 12n. adamw: 28n. cast: 6n. gather: weights
    leave and arrive, 4(W-1)n. link, network: 2 bytes of all elements around rings, in scatter and gather.
    """
    n, sent = elements / ranks, around(2 * elements, ranks, of_host)
    return {
        "scatter": Traffic("2N + 4(W-1)n + 2n", 2 * elements + 4 * (ranks - 1) * n + 2 * n, *sent),
        "widen": Traffic("6n", 6 * n),
        "clip": Traffic("12n", 12 * n),
        "adamw": Traffic("28n", 28 * n),
        "cast": Traffic("6n", 6 * n),
        "gather": Traffic("4(W-1)n", 4 * (ranks - 1) * n, *sent),
    }


def fsdp2_phases(elements: int, ranks: int, of_host: int) -> dict[str, Traffic]:
    """What fully_shard sends in a step, and nothing else of it: bfloat16 parameters for the forward pass and,
    resharded after that, for the backward pass; gradients in FP32, which is the reduce_dtype of
    `scripts/bench.py fsdp2` and of torchtitan. A reduce_dtype of bfloat16 halves the gradients.
    """
    weights, gradients = (around(nbytes * elements, ranks, of_host) for nbytes in (2, 4))
    words = "not counted"
    return {
        "forward": Traffic(words, 0, *weights),
        "backward": Traffic(words, 0, *weights),
        "scatter": Traffic(words, 0, *gradients),
    }


def bf16_parts(ranks: int) -> dict[str, tuple[str, ...]]:
    """A rank alone scatters and gathers nothing."""
    publish = ("cast", "gather") if ranks > 1 else ("cast",)
    reduce, update = ("scatter", "widen") if ranks > 1 else ("widen",), ("adamw", *publish)
    return {
        "step": (*reduce, *update),
        "step_clipped": (*reduce, "clip", *update),
        "reduce": reduce,
        "update": update,
        "publish": publish,
    }


def row_of(way: str, part: str, ranks: int) -> str:
    """The name of a row of measured milliseconds. A world of one has one step for both transports."""
    if way == "bf16":
        part = "step_bf16_clipped" if part == "step_clipped" else f"{part}_bf16"
    prefix = WAYS[way] if ranks > 1 else ""
    return f"{prefix}{part}/{ranks}xcuda"


class Measured(NamedTuple):
    """A result file of `scripts/bench.py step` on GPUs: their number, and the rows by name."""

    ranks: int
    result: dict
    rows: dict[str, dict]

    @property
    def setting(self) -> tuple[str, int]:
        """Of files that are compared: the device, and what divides the weights' dimensions."""
        return self.result["device"], self.result["settings"]["scale"]

    def milliseconds(self, way: str, part: str) -> float | None:
        """None where it was not measured."""
        row = self.rows.get(row_of(way, part, self.ranks))
        return None if row is None else row["milliseconds"]


class Cell(NamedTuple):
    """Milliseconds of a part of a step, None where it was not measured, or is none."""

    measured: float | None
    predicted: float | None

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.measured and self.predicted else None


class Growth:
    """How a step grows with the number of GPUs: the files of one device and scale, and the model that its
    smallest number of GPUs above 1 was measured for.

    A part of a step takes, with any number of GPUs, as much longer than the sum of its phases' floors as it
    takes with that number.
    """

    def __init__(self, measured: Sequence[Measured]):
        self.base = min((one for one in measured if one.ranks > 1), key=lambda one: one.ranks)
        same = [one for one in measured if one.setting == self.base.setting]
        self.measured = {one.ranks: one for one in same}
        link = self.base.rows[f"link/{self.base.ranks}xcuda"]["gigabytes_per_second"]
        self.speeds = Speeds(*(1e9 * gbps for gbps in (self.base.result["copy_gbps"], link)))
        self.shapes = weight_shapes(self.base.result["settings"]["scale"])
        self.ranks = sorted({*RANKS, *self.measured})
        self.left_out = [one.result for one in measured if one not in same]

    def cell(self, way: str, part: str, ranks: int) -> Cell:
        found, longer = self.measured.get(ranks), self.longer(way, part)
        took = None if found is None else found.milliseconds(way, part)
        return Cell(took, longer and (longer * self.floor(way, part, ranks) or None))

    def longer(self, way: str, part: str) -> float | None:
        """What was measured over its floor, None where it was not measured."""
        took = self.base.milliseconds(way, part)
        return took and took / self.floor(way, part, self.base.ranks)

    def floor(self, way: str, part: str, ranks: int) -> float:
        return sum(map(self.speeds.floor, phases_of(way, self.shapes, ranks)[part]))

    def on_hosts(self, way: str, gpus: int, gbps: float) -> tuple[float | None, float]:
        """Predicted milliseconds of a step, and the GB that a GPU sends to other hosts, at `gbps`. The step
        takes longer than its floor by the measured factor of the way that HOST_WAYS names; "fsdp2" takes its
        floor.
        """
        found = phases_of(way, self.shapes, gpus, OF_HOST)["step"]
        floor = sum(map(self.speeds._replace(network=1e9 * gbps).floor, found))
        like = "peer" if way == "default" and gpus <= OF_HOST else HOST_WAYS[way]
        longer = 1.0 if like is None else self.longer(like, "step")
        return longer and longer * floor, sum(traffic.network for traffic in found) / 1e9


def growth_of(results: Sequence[dict]) -> Growth | None:
    """Of all result files; None where no step of several GPUs is among them."""
    found = []
    for result in results:
        name = re.fullmatch(r"step_(\d+)_ranks", result["benchmark"])
        if name and result["threads"] is None:
            rows = {row["name"]: row for row in result["rows"]}
            found.append(Measured(int(name[1]), result, rows))
    return Growth(found) if any(one.ranks > 1 for one in found) else None
