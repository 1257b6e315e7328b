"""How the bytes of an operation are counted: what it must read and write once, with n owned elements.

Every function returns the bytes and the rule in words, which goes beside the figure: of a workload, or of the
tensors that an operation on a single one is given and makes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from benchmarking.workloads import Workload
from zerofp4.tensors.quantized_tensor import QuantizedTensor


class Moved(NamedTuple):
    """elements: what instructions are counted by (budgets.py); scales or tiles where there are no values."""

    bytes: float
    rule: str
    elements: int


def counted_as(row: dict) -> Moved:
    """For another way to do what that row does, however many bytes it moves."""
    return Moved(row["bytes"], f"counted as {row['name']}", row["elements"])


def begin(workload: Workload) -> Moved:
    return Moved(4 * workload.tiles, "4 per tile", workload.tiles)


def amax(workload: Workload) -> Moved:
    moved = 4 * workload.owned + 4 * workload.owned_tiles
    return Moved(moved, "4n + 4 per owned tile", workload.owned)


def scale(workload: Workload) -> Moved:
    """Of all weights, whoever owns them: an amax read, and the bytes of each scale buffer written, compact
    ones a byte per tile and side.
    """
    if workload.scale_layouts == ("compact",):
        return Moved(6 * workload.tiles, "6 per tile of all weights", workload.tiles)
    moved = 4 * workload.tiles + workload.scale_bytes
    return Moved(moved, "4 per tile of all weights + their scale buffers", workload.tiles)


def cast(workload: Workload) -> Moved:
    moved = 4.5 * workload.owned + 4 * workload.owned_tiles
    return Moved(moved, "4.5n + 4 per owned tile", workload.owned)


def local_step(workload: Workload) -> Moved:
    """The masters twice, the codes and the scales. The vector of amaxes counts once, as read by scale."""
    scales = scale(workload)
    return Moved(8.5 * workload.owned + scales.bytes, f"8.5n + {scales.rule}", workload.owned)


def transpose(workload: Workload) -> Moved:
    """The codes: the scale stage has written the scales of both sides."""
    rule = "1 per element, half read, half written; scales: in the scale stage"
    return Moved(workload.elements, rule, workload.elements)


def adamw(workload: Workload) -> Moved:
    rule = "28n: master and two moments read and written, gradient read"
    return Moved(28 * workload.owned, rule, workload.owned)


def adamw_then_cast(workload: Workload) -> Moved:
    """What both need who read the masters once for the amaxes: those come out of the update."""
    scales = scale(workload)
    return Moved(32.5 * workload.owned + scales.bytes, f"32.5n + {scales.rule}", workload.owned)


def bf16_copy(workload: Workload) -> Moved:
    return Moved(6 * workload.owned, "6n", workload.owned)


def once(tensors: Iterable[torch.Tensor], elements: int, words: str) -> Moved:
    """Every byte of these tensors, read or written."""
    size = sum(tensor.nbytes for tensor in tensors)
    return Moved(size, f"{size / elements:.5g}n: {words}", elements)


def quantize(x: torch.Tensor, out: QuantizedTensor) -> Moved:
    return once([x, *buffers(out)], x.numel(), "x read, codes and scales written")


def dequantize(data: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> Moved:
    return once([data, scale, values], values.numel(), "codes and scales read, values written")


def amax_pass(x: torch.Tensor) -> Moved:
    return once([x], x.numel(), "x read")


def elementwise(x: torch.Tensor, values: torch.Tensor) -> Moved:
    return once([x, values], x.numel(), "x read, values written")


def rearrange(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> Moved:
    """Of scales: the padding of the targets included."""
    read, written = (sum(tensor.nbytes for tensor in tensors) for tensors in (sources, targets))
    return Moved(read + written, "scales read and written", read)


def buffers(tensor: QuantizedTensor) -> list[torch.Tensor]:
    return [buffer for _, buffer in tensor.record.buffers()]
