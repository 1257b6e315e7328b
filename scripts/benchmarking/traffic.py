"""What the phases of an optimizer step of several ranks must move, in a rank's memory and on the way to
others. No phase can take less time than the slowest of these ways.

In the formulas W is the number of ranks, N of elements, n = N / W those that a rank owns, T the tiles of 16 x
16 in all weights, and w the bytes of a gradient on its way. In a GPU's memory what lies between two
parameters counts as nothing, and so does what travels of amaxes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div

NOTHING: Mapping[str, float] = MappingProxyType({"gradients": 0, "amaxes": 0, "weights": 0})


class Traffic(NamedTuple):
    """Bytes of a rank in a phase. formula: that of memory, in words. memory: what its GPU's memory reads and
    writes, with what it serves to other ranks and what they write there. link: what it sends to other GPUs of
    its host; as much arrives. network: what it sends to other hosts.
    """

    formula: str
    memory: float
    link: float = 0
    network: float = 0


class Speeds(NamedTuple):
    """Bytes a second, of a rank: of its memory, read and written, as a copy within it has them; of what it
    sends to other GPUs of its host, and to other hosts. None where nothing goes there.
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
    in_buckets: as describe() has them; transport is "hosts" where gradients are added up on each of several
    hosts first. sent, across: by what it is, bytes that a rank sends to other GPUs of its host, and to other
    hosts.
    """

    elements: int
    tiles: int
    ranks: int
    gradient_bytes: int
    transport: str
    in_buckets: bool
    sent: Mapping[str, float]
    across: Mapping[str, float] = NOTHING
    hosts: int = 1

    @property
    def owned(self) -> float:
        return self.elements / self.ranks


def elements_of(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(rows * cols for rows, cols in shapes)


def tiles_of(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK) for rows, cols in shapes)


def step_of(shapes: Sequence[tuple[int, int]], described: Mapping[str, Any]) -> Step:
    """Of all weights of an optimizer, sharded over ranks of one host, and its describe().

    Raises ValueError for buckets that do not travel alike, and for several hosts, of which describe() does
    not say what is sent where.
    """
    if described["hosts"] is not None:
        raise ValueError(f"hosts: what {described['hosts']} of them send has no formula")
    ways = {(bucket["ranks"], bucket["gradients_travel_as"]) for bucket in described["buckets"]}
    if len(ways) != 1:
        raise ValueError(f"buckets travel in several ways: {sorted(ways)}")
    ((ranks, dtype),) = ways
    return Step(
        elements_of(shapes),
        tiles_of(shapes),
        ranks,
        getattr(torch, dtype).itemsize,
        described["transport"],
        described["in_buckets"],
        described["bytes_sent"],
    )


def phases(step: Step) -> dict[str, Traffic]:
    """By phase, what it moves. parts() says which phases a step, or a part of it, consists of.

    scan: a rank's gradients are looked through for a NaN or Inf, wN.
    reduce: gradients become means in the FP32 slice of their owner, 4n, and are read for it:
        "peer", wW by owned element: w of this rank's, w(W-1) of other ranks', as much as it serves to them;
        "collective", w(3W-2): the same, behind w(W-1) that are read to be sent and w(W-1) that arrive;
        "none", w: they are the rank's own.
        "hosts", wW + 16H - 8: on each of H hosts as "peer", and of the hosts' means, in FP32, 4H are made,
        4(H-1) read to be sent, 4(H-1) arrive and 4H are read at last.
        link and network: gradients.
    norm: squares of a rank's own gradients are added up, wN, where they are means.
    adamw: master and two moments are read and written, an FP32 gradient read, 28n.
    adamw_reducing: the same, but what reduce reads in place of the FP32 gradient: 24n and that.
    publish: masters become codes, 4.5n; amaxes of all tiles become scales of both sides, 6T; codes leave for
        every other rank and arrive from there, (W-1)n; all weights are transposed, N. link and network:
        amaxes and codes.
    publish_alone: the same where no update has left the amaxes: 4n + 4T/W more.
    gather: what travels of the codes alone, (W-1)n. link and network: codes.
    """
    n, ranks, w = step.owned, step.ranks, step.gradient_bytes
    reading, words = _reading(step)
    travel = step.sent["gradients"], step.across["gradients"]
    gather = tuple(way["amaxes"] + way["weights"] for way in (step.sent, step.across))
    codes = 4.5 * n + 6 * step.tiles + (ranks - 1) * n + step.elements
    words_of_codes = "4.5n + 6T + (W-1)n + N"
    amaxes = 4 * n + 4 * step.tiles / ranks
    return {
        "scan": Traffic(f"{w}N", w * step.elements),
        "reduce": Traffic(f"4n + {words}n", (4 + reading) * n, *travel),
        "norm": Traffic(f"{w}N", w * step.elements),
        "adamw": Traffic("28n", 28 * n),
        "adamw_reducing": Traffic(f"24n + {words}n", (24 + reading) * n, *travel),
        "publish": Traffic(words_of_codes, codes, *gather),
        "publish_alone": Traffic(f"4n + 4T/W + {words_of_codes}", codes + amaxes, *gather),
        "gather": Traffic("(W-1)n", (ranks - 1) * n, step.sent["weights"], step.across["weights"]),
    }


def _reading(step: Step) -> tuple[float, str]:
    """Bytes by owned element that adding up gradients reads, and moves before that; in words."""
    w, ranks, hosts = step.gradient_bytes, step.ranks, step.hosts
    if step.transport == "none":
        return w, f"{w}"
    if step.transport == "collective":
        return w * (3 * ranks - 2), f"{w}(3W-2)"
    if step.transport == "peer":
        return w * ranks, f"{w}W"
    if step.transport == "hosts":
        return w * ranks + 16 * hosts - 8, f"({w}W + 16H - 8)"
    raise ValueError(f"no formula for transport {step.transport!r}")


def parts(step: Step) -> dict[str, tuple[str, ...]]:
    """By what scripts/bench.py step measures, its phases, one behind the other."""
    if step.ranks == 1 and step.in_buckets:  # the gradients are means
        update = "adamw_reducing", "publish"
        return {
            "step": ("scan", *update),
            "step_clipped": ("scan", "norm", *update),
            "reduce": (),
            "update": update,
            "publish": ("publish_alone",),
        }
    update = "adamw", "publish"
    whole = ("adamw_reducing", "publish") if step.in_buckets else ("reduce", *update)
    travels = {"gather": ("gather",)} if step.ranks > 1 else {}
    return travels | {
        "step": ("scan", *whole),
        "step_clipped": ("scan", "reduce", *update),
        "reduce": ("reduce",),
        "update": update,
        "publish": ("publish_alone",),
    }
