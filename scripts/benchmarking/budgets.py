"""What a call cannot be faster than, whatever the memory does: the instructions that it executes.

The counts are those of scripts/bench.py instructions: of all threads by the element, from one call on a large
matrix. A list of small or odd pieces executes more, so that no row can reach more than what is said of it.
"""

from typing import NamedTuple

LANES = {"issue": 128, "ALU": 64, "FMA": 128}
"""Threads that a multiprocessor of compute capability 9.0 can execute an instruction for in a cycle: what its
four schedulers issue, and what its units for integers and logic and its multipliers take. Half of the latter
multiply integers too; what ncu counts for that half could partly have gone to the other, and is no bound."""

COUNTS = {"issue": "instructions", "ALU": "alu", "FMA": "fma"}
"""The count that each of them limits."""

CYCLES_PER_SECOND = {"NVIDIA H200": 132 * 1.755e9}
"""Of all multiprocessors, by device. The clock of 1.755 GHz is assumed; the device may exceed it."""


class Bound(NamedTuple):
    """The time below which a call cannot come for what `limit` executes in a cycle."""

    limit: str
    seconds: float


def bounds(counts: dict, elements: float, device: str) -> list[Bound]:
    """Of a call on so many elements, the tightest first.

    counts: "instructions", "alu" and "fma" by the element; one that is not there or None bounds nothing.
    Empty for a device whose rates are not known.
    """
    cycles = CYCLES_PER_SECOND.get(device)
    if cycles is None:
        return []
    found = [
        Bound(limit, elements * counts[count] / (cycles * LANES[limit]))
        for limit, count in COUNTS.items()
        if counts.get(count) is not None
    ]
    return sorted(found, key=lambda bound: bound.seconds, reverse=True)


def budget(row: dict, counts: dict, device: str, copy_gbps: float) -> str | None:
    """The budget of a timed row in words: its instructions, and at what percentage of the copy the tightest
    bound lies. None where the row does not say its elements, or nothing is known.
    """
    found = bounds(counts, row.get("elements") or 0, device)
    if not found or not found[0].seconds:
        return None
    limit, seconds = found[0]
    percent = 100 * row["bytes"] / seconds / 1e9 / copy_gbps
    return f"{in_words(counts)}: at most {percent:.0f}% by {limit}"


def in_words(counts: dict) -> str:
    """As "33 instructions (16 ALU, 12 FMA)", of those that were counted."""
    total = counts.get("instructions")
    units = ((counts.get(COUNTS[unit]), unit) for unit in ("ALU", "FMA"))
    parts = ", ".join(f"{count:.3g} {unit}" for count, unit in units if count is not None)
    if total is None:
        return f"instructions: {parts}"
    return f"{total:.3g} instructions" + (f" ({parts})" if parts else "")
