"""How long a step would take if it did nothing but move its bytes, beside how long it takes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarking.timer import Timer
from benchmarking.traffic import Speeds, parts, phases, step_of
from zerofp4.engine import Peers, join_peers

SENT_BYTES = {"cuda": 2 << 30, "cpu": 4 << 20}
"""What a rank sends as its link is measured."""
MOST_OVER_FLOOR = {"peer_step": (2, 1.15), "peer_gather": (4, 1.05)}
"""By row, of how many GPUs on, and how much."""


def measure_speeds(timer: Timer) -> Speeds:
    """Of a copy within a GPU's memory, as the session has measured it, and of what every rank sends to all
    others at once. A row says the latter.
    """
    memory, ranks = timer.session.copy_before * 1e9, timer.world.world_size
    if ranks == 1:
        return Speeds(memory)
    peers, why = join_peers("auto", dist.group.WORLD, timer.device)
    piece = SENT_BYTES[timer.device.type] // (ranks - 1) // 32 * 32
    ms, rule = _time_copies(timer, peers, piece) if peers else _time_messages(timer, piece)
    link = (ranks - 1) * piece / ms / 1e6
    rule = f"{rule}, {ranks - 1} x {piece / 1e6:,.0f} MB" + ("" if why is None else f" ({why})")
    timer.session.count(f"link/{timer.places}", "gigabytes_per_second", link, rule)
    return Speeds(memory, link * 1e9)


def _time_copies(timer: Timer, peers: Peers, piece: int) -> tuple[float, str]:
    """As a gather of weights copies, by two copy engines."""
    theirs = peers.zeros((timer.world.world_size, piece), torch.uint8)
    own = torch.zeros(piece, dtype=torch.uint8, device=timer.device)
    middle = piece // 32 * 16
    firsts, seconds = (
        [(peers.at(rank, theirs[timer.world.rank])[part], own[part]) for rank in peers.others]
        for part in (slice(middle), slice(middle, None))
    )
    found = timer.time(lambda: peers.start_copies(firsts, seconds).wait())
    return found, "every rank copies into the memory of all others"


def _time_messages(timer: Timer, piece: int) -> tuple[float, str]:
    here, there = (
        torch.zeros(timer.world.world_size * piece, dtype=torch.uint8, device=timer.device) for _ in range(2)
    )
    found = timer.time(lambda: dist.all_to_all_single(there, here))
    return found, f"an all-to-all of {timer.world.backend}"


def count_floors(
    timer: Timer,
    shapes: Sequence[tuple[int, int]],
    described: Mapping[str, Any],
    speeds: Speeds,
    prefix: str,
    measured: Mapping[str, float],
) -> None:
    """Rows of the floors of a step's phases, and of what its parts took over the sums of theirs.

    described: of the optimizer that takes the steps. prefix: of the names of its rows. measured: milliseconds
    by part.
    """
    step, floors = step_of(shapes, described), {}
    used = {phase for names in parts(step).values() for phase in names}
    for phase, traffic in ((phase, traffic) for phase, traffic in phases(step).items() if phase in used):
        floors[phase] = speeds.floor(traffic)
        times = speeds.milliseconds(traffic)
        rule = f"memory: {traffic.formula} bytes, {traffic.memory / 1e9:.3g} GB, {times['memory']:.3g} ms"
        if traffic.link:
            rule += f"; link: {traffic.link / 1e9:.3g} GB, {times['link']:.3g} ms"
        timer.session.count(f"{prefix}floor_{phase}/{timer.places}", "milliseconds", floors[phase], rule)
    for part, names in parts(step).items():
        if not names:
            continue
        name, floor = f"{prefix}{part}", sum(floors[phase] for phase in names)
        if len(names) > 1:
            rule = f"the sum of those of {', '.join(names)}"
            timer.session.count(f"{prefix}floor_{part}/{timer.places}", "milliseconds", floor, rule)
        fewest, most = MOST_OVER_FLOOR.get(name, (math.inf, None))
        target = most if timer.device.type == "cuda" and step.ranks >= fewest else None
        rule = f"{part} over what its bytes take: {' + '.join(f'{p} {floors[p]:.3g}' for p in names)} ms"
        row = f"{name}_over_floor/{timer.places}"
        timer.session.count(row, "ratio", measured[part] / floor, rule, target=target)
