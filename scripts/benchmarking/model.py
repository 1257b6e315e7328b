"""What steps of other numbers of GPUs take by their bytes, and by how much measured ones take longer."""

from collections.abc import Mapping, Sequence

from benchmarking.traffic import Step, Traffic, elements_of, parts, phases, tiles_of

GPUS_OF_A_HOST = 8
GRADIENT_BYTES = 2
WAYS = {"collective": "", "peer": "peer_", "bf16": ""}
"""Of taking a step, with what the names of their rows begin with."""
PARTS = ("step", "step_clipped", "reduce", "update", "publish")

Phases = list[tuple[str, Traffic]]


def phases_of(way: str, shapes: Sequence[tuple[int, int]], ranks: int) -> dict[str, Phases]:
    """By part of a step, its phases in their order. ranks: up to 8, on one host, or a multiple of 8.

    Raises ValueError for other numbers, whose hosts would not be alike.
    """
    if ranks > GPUS_OF_A_HOST and ranks % GPUS_OF_A_HOST:
        raise ValueError(f"{ranks} GPUs are not on hosts of {GPUS_OF_A_HOST}")
    if way == "bf16":
        found, of_parts = bf16_phases(elements_of(shapes), ranks), bf16_parts(ranks)
    else:
        step = planned(shapes, ranks, way)
        found, of_parts = phases(step), parts(step)
    return {part: [(name, found[name]) for name in names] for part, names in of_parts.items()}


def planned(shapes: Sequence[tuple[int, int]], ranks: int, transport: str) -> Step:
    """A step of ranks that are not there, with bfloat16 gradients. Behind one host "peer" is what `hosts` of
    ZeroFP4Optimizer makes of it.

    With W ranks, L on each of H hosts, and n elements that a rank owns, a rank sends 2(W-1)n of gradients, of
    them 2(L-1)n to its host; with `hosts` 2(L-1)Hn there and 4(H-1)n to other hosts. Amaxes, 2 bytes of a
    tile that are all-reduced, and codes, half a byte of an element, go around rings.
    """
    elements, tiles, hosts = elements_of(shapes), tiles_of(shapes), _hosts(ranks)
    n, local = elements / ranks, ranks // hosts
    if ranks == 1:
        transport = "none"
    elif hosts > 1 and transport == "peer":
        transport = "hosts"
    if transport == "hosts":
        gradients = GRADIENT_BYTES * (local - 1) * hosts * n, 4 * (hosts - 1) * n
    else:
        gradients = GRADIENT_BYTES * (local - 1) * n, GRADIENT_BYTES * (ranks - local) * n
    ways = zip(gradients, ring(2 * 2 * tiles, ranks), ring(elements / 2, ranks), strict=True)
    sent, across = (dict(zip(("gradients", "amaxes", "weights"), way, strict=True)) for way in ways)
    return Step(elements, tiles, ranks, GRADIENT_BYTES, transport, True, sent, across, hosts)


def ring(nbytes: float, ranks: int) -> tuple[float, float]:
    """What a rank sends to its host and to the next one, as all but the share of a rank goes around a ring of
    them. There is a ring for each GPU of a host, which is the last one there in one of them.
    """
    around, hosts = nbytes * (ranks - 1) / ranks, _hosts(ranks)
    if hosts == 1:
        return around, 0.0
    local = ranks // hosts
    return around * (local - 1) / local, around / local


def _hosts(ranks: int) -> int:
    return max(1, ranks // GPUS_OF_A_HOST)


def bf16_phases(elements: int, ranks: int) -> dict[str, Traffic]:
    """Of bf16.py's step, each behind the other. W ranks own n of N elements each.

    scatter: gradients read, 2N; sums arrive, are read, and leave, 4(W-1)n; the mean, 2n. widen: the slice
    becomes FP32, 6n. clip: read for its norm, read and written, 12n. adamw: 28n. cast: 6n. gather: weights
    leave and arrive, 4(W-1)n. link and network: 2 bytes of all elements around a ring, in scatter and gather.
    """
    n, around = elements / ranks, ring(2 * elements, ranks)
    return {
        "scatter": Traffic("2N + 4(W-1)n + 2n", 2 * elements + 4 * (ranks - 1) * n + 2 * n, *around),
        "widen": Traffic("6n", 6 * n),
        "clip": Traffic("12n", 12 * n),
        "adamw": Traffic("28n", 28 * n),
        "cast": Traffic("6n", 6 * n),
        "gather": Traffic("4(W-1)n", 4 * (ranks - 1) * n, *around),
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


def milliseconds(rows: Mapping[str, dict], way: str, part: str, ranks: int) -> float | None:
    """What was measured, by name of row; None where it was not."""
    row = rows.get(row_of(way, part, ranks))
    return None if row is None else row["milliseconds"]
