"""Exact products of groups of rows, each with a matrix of its own, in one launch of torch's grouped_mm: on
CUDA, where sizes of groups are on the device and nobody reads them back.

Groups are a tensors.GroupedNVFP4Tensor. grouped_mm takes bfloat16, adds in float32 and rounds to bfloat16,
and has no factor for a group. So the factor of a group, amax * amax * (1/2688)^2, is

- multiplied into the values of its weight, which are rounded to bfloat16 then (an error of 2^-9 at most in
  each product), for the output and the gradient of the input. Multiplied into an output that was rounded to
  bfloat16 already it would be as large, and cost a pass;
- multiplied into the gradient of its weight, a pass over that, since its operands are both of all groups.

Splits that are not valid, which only the device knows, give NaN.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.format import BLOCK, E2M1_MAX, E4M3_MAX
from zerofp4.gemm.operand import Operand

SIZE_MULTIPLE = 8
"""Of the rows and columns of matrices: 16 bytes of bfloat16, of which grouped_mm wants multiples."""

CAPABILITIES = (9, 10)
"""Major versions for which grouped_mm is one kernel; for others it reads the sizes back."""

_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_GLOBAL = 1 / (E2M1_MAX * E4M3_MAX)


def why_not_grouped(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> str | None:
    """Why products of that dtype with matrices of these sizes are not in one launch; None where they are."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in CAPABILITIES:
        return f"grouped_mm is one kernel on compute capabilities {CAPABILITIES} only, got {device}"
    if dtype != torch.bfloat16 or any(size % SIZE_MULTIPLE for size in sizes):
        return f"grouped_mm takes bfloat16 and multiples of {SIZE_MULTIPLE}, got {dtype} and {tuple(sizes)}"
    return None


def grouped_gemm(groups: Any, weights: Sequence[Operand]) -> torch.Tensor:
    """bfloat16 [tokens, rows of a weight]: of each row of rowwise `groups` with the weight of its group."""
    amaxes = torch.cat([weight.copy.amax for weight in weights])
    bad = groups.error.bool()
    amaxes = ((amaxes * _GLOBAL) * groups.rowwise.amax).masked_fill(bad, torch.nan)
    copies = [
        (weight.copy.data, weight.copy.scales["compact"], weight.record.block[0], False) for weight in weights
    ]
    matrices = ops.stacked_values_of(copies, amaxes, torch.bfloat16)
    offsets = groups.offsets[1:].masked_fill(bad, groups.shape[0]).to(torch.int32)
    return _grouped_mm(rowwise_values(groups), matrices.transpose(1, 2), offs=offsets)


def grouped_wgrad(a: Any, b: Any) -> torch.Tensor:
    """bfloat16 [groups, columns of a, columns of b]: a^T b of each group's rows, from columnwise copies."""
    offsets = a.data_offsets[1:].to(torch.int32)
    out = _grouped_mm(columnwise_values(a), columnwise_values(b).t(), offs=offsets)
    alpha = (a.columnwise.amax * _GLOBAL) * (b.columnwise.amax * _GLOBAL)
    return out.mul_(alpha.masked_fill(a.error.bool(), torch.nan).view(-1, 1, 1))


def groups_of_rows(groups: Any) -> torch.Tensor:
    """int64 [tokens]: the group of each row; the last one where splits are not valid."""
    own = torch.arange(groups.shape[0], device=groups.device)
    return torch.searchsorted(groups.offsets[1:-1], own, right=True)


def rowwise_values(groups: Any) -> torch.Tensor:
    """bfloat16 [tokens, K] without global scales: the rows of all groups without the padding between them."""
    own = torch.arange(groups.shape[0], device=groups.device)
    shift = groups.data_offsets - groups.offsets
    place = own + shift[groups_of_rows(groups)]
    data = groups.rowwise.data.index_select(0, place)
    scale = groups.rowwise.scales["compact"].view(torch.uint8).index_select(0, place)
    return _values(data, scale)


def columnwise_values(groups: Any) -> torch.Tensor:
    """bfloat16 [K, R] without global scales, group g in columns data_offsets[g] to data_offsets[g + 1]; zeros
    in the padding and behind the last.

    A group is stored as a matrix of its own; of 16 rows of it a column has 8 bytes of codes and one scale.
    """
    cols = groups.shape[1]
    scale = groups.columnwise.scales["compact"].view(torch.uint8)
    begins = groups.data_offsets // BLOCK
    blocks = torch.arange(len(scale) // cols, device=groups.device)
    group = torch.searchsorted(begins[1:], blocks, right=True)
    ends = torch.cat([begins[1:], begins.new_full((1,), len(blocks))])  # what is behind the last is a group
    begin, end = begins[group], ends[group]
    along = torch.arange(cols, device=groups.device).unsqueeze(1)
    place = begin * cols + along * (end - begin) + (blocks - begin)
    data = groups.columnwise.data.view(torch.int64)[place].view(torch.uint8)
    return _values(data, scale[place])


def _values(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ops.stacked_values_of([(data, scale, 1, False)], ops.neutral_amax(data.device), torch.bfloat16)[0]
