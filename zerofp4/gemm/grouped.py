"""Exact products of groups of rows, each with its own matrix, in one launch of torch's grouped_mm.

grouped_mm multiplies bfloat16, sums in float32 and has no factor for a group. So a group's factor, amax *
amax * (1/2688)^2, is multiplied into the values of its rows (of the first operand in grouped_wgrad), which
adds one rounding to bfloat16: an error of at most 2^-9 in each product. The values of weights are exact.
Invalid splits, which only the device knows, give NaN.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.format import E4M3_MAX
from zerofp4.storage import NVFP4Storage, unstack

SIZE_MULTIPLE = 8
"""Of the rows and columns of matrices: 16 bytes of bfloat16, of which grouped_mm wants multiples."""

CAPABILITIES = (9, 10)
"""Major versions for which grouped_mm is one kernel; for others it reads the sizes back."""

grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def why_not_grouped(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> str | None:
    """Why products of that dtype with matrices of these sizes are not in one launch; None where they are."""
    if grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return f"grouped_mm is one kernel on compute capabilities {CAPABILITIES} only, got {device}"
    if dtype != torch.bfloat16 or any(size % SIZE_MULTIPLE for size in sizes):
        return f"grouped_mm takes bfloat16 and multiples of {SIZE_MULTIPLE}, got {dtype} and {tuple(sizes)}"
    return None


class GroupedOperand:
    """The other factor of products of groups: one side, or its transposes, of a record for each group or of a
    stack's. All have that side, and the same e4m3_max.
    """

    def __init__(self, records: Sequence[NVFP4Storage], side: str, transposed: bool = False):
        first, self._transposed = records[0], transposed
        copies = records if first.experts is None else unstack(first, first.experts)
        sides = [getattr(each, side) for each in copies]
        self._sides, self._scales = sides, [each.scales["compact"] for each in sides]
        self._block_rows, self.e4m3_max = first.block[0], first.e4m3_max
        amaxes = [each.amax for each in sides]
        ops.addresses_of("amax", amaxes)  # raises if one was freed: torch does not ask
        self.amaxes = torch.cat(amaxes) if first.experts is None else getattr(first, side).amax
        """float32 [groups]"""

    def values(self) -> torch.Tensor:
        """bfloat16 [groups, rows, contraction], exact, without global scales."""
        data = [each.data for each in self._sides]  # which may be on its way, each time anew
        shape = len(data), data[0].shape[0], 2 * data[0].shape[1]
        values = data[0].new_empty(shape, dtype=torch.bfloat16)
        options = ops.neutral_amax(values.device), self._block_rows, int(E4M3_MAX), False
        copies = [(codes, scale, *options) for codes, scale in zip(data, self._scales, strict=True)]
        ops.values_of_many(copies, values.dtype, values.unbind())
        return values.transpose(1, 2) if self._transposed else values


def grouped_gemm(groups: Any, weights: GroupedOperand) -> torch.Tensor:
    """bfloat16 [tokens, rows of a weight]: of each row of rowwise `groups` with the weight of its group."""
    rows, ends = values_of_groups(groups, "rowwise", weights.amaxes, weights.e4m3_max)
    return grouped_mm(rows, weights.values().transpose(1, 2), offs=ends)


def grouped_wgrad(a: Any, b: Any) -> torch.Tensor:
    """bfloat16 [groups, columns of a, columns of b]: a^T b of each group's rows, from columnwise copies."""
    left, ends = values_of_groups(a, "columnwise", b.columnwise.amax)
    return grouped_mm(left, values_of_groups(b, "columnwise")[0].t(), offs=ends)


def values_of_groups(groups: Any, side: str, *other: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a side without the gaps between groups, and the ends of the groups: ops.grouped_values."""
    places = groups.offsets, groups.data_offsets, groups.error, tuple(groups.shape)
    return ops.grouped_values(getattr(groups, side), *places, side == "columnwise", *other)


def groups_of_rows(groups: Any) -> torch.Tensor:
    """int64 [tokens]: the group of each row; the last one where splits are not valid."""
    own = torch.arange(groups.shape[0], dtype=torch.int64, device=groups.device)
    return torch.searchsorted(groups.offsets[1:-1], own, right=True)
