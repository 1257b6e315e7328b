"""How the bytes of an operation are counted: what it must read and write once, with n owned elements.

Every function takes a workload and returns the bytes and the rule in words, which goes beside the figure.
"""

from typing import NamedTuple

from benchmarking.workloads import Workload


class Moved(NamedTuple):
    bytes: float
    rule: str


def begin(workload: Workload) -> Moved:
    return Moved(4 * workload.tiles, "4 per tile")


def amax(workload: Workload) -> Moved:
    return Moved(4 * workload.owned + 4 * workload.owned_tiles, "4n + 4 per owned tile")


def scale(workload: Workload) -> Moved:
    """Of all weights, whoever owns them: an amax read, and the bytes of each scale buffer written, compact
    ones a byte per tile and side.
    """
    if workload.scale_layouts == ("compact",):
        return Moved(6 * workload.tiles, "6 per tile of all weights")
    return Moved(4 * workload.tiles + workload.scale_bytes, "4 per tile of all weights + their scale buffers")


def cast(workload: Workload) -> Moved:
    return Moved(4.5 * workload.owned + 4 * workload.owned_tiles, "4.5n + 4 per owned tile")


def local_step(workload: Workload) -> Moved:
    """The masters twice, the codes and the scales. The vector of amaxes counts once, as read by scale."""
    scales = scale(workload)
    return Moved(8.5 * workload.owned + scales.bytes, f"8.5n + {scales.rule}")


def transpose(workload: Workload) -> Moved:
    """The codes: the scale stage has written the scales of both sides."""
    return Moved(workload.elements, "1 per element, half read, half written; scales: in the scale stage")


def adamw(workload: Workload) -> Moved:
    return Moved(28 * workload.owned, "28n: master and two moments read and written, gradient read")


def adamw_then_cast(workload: Workload) -> Moved:
    """What both need who read the masters once for the amaxes: those come out of the update."""
    scales = scale(workload)
    return Moved(32.5 * workload.owned + scales.bytes, f"32.5n + {scales.rule}")


def bf16_copy(workload: Workload) -> Moved:
    return Moved(6 * workload.owned, "6n")
