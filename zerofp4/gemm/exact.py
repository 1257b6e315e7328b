"""The exact backend: a product of values that bfloat16 holds, for hardware without FP4 tensor cores.

An E2M1 value has at most 2 significant bits and an E4M3 scale 4, so their product has at most 6 and is exact
in bfloat16, which has 8. MXFP8's elements have 4, times a power of two: exact from 2^-126 on.
"""

import torch

from zerofp4 import ops
from zerofp4.format import E2M1_MAX, E4M3_MAX
from zerofp4.gemm.operand import Operand

_neutral_amaxes: dict[torch.device, torch.Tensor] = {}


def multiply(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(float32 [rows of a, rows of b], alpha): the sums of products of codes and block scales, and the
    float32 [1] that they are still to be multiplied with; None for no factor.
    """
    if a.device.type != "meta" and torch.is_autocast_enabled(a.device.type):  # meta has no autocast
        with torch.autocast(a.device.type, enabled=False):  # which would round sums to its dtype
            return multiply(a, b)
    if a.device.type == "cuda":
        sums = torch.mm(values(a), values(b).t(), out_dtype=torch.float32)
    else:
        sums = torch.mm(values(a, torch.float32), values(b, torch.float32).t())
    scale_a, scale_b = a.global_scale(), b.global_scale()
    return sums, None if scale_a is None else scale_a * scale_b


def values(operand: Operand, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[rows, contraction], the last group of a transform completed: the operand's values without its global
    scale, as bfloat16 holds them, in bfloat16 or float32.
    """
    copy, record = operand.copy, operand.record
    scale = copy.scales["compact"]
    if not operand.is_nvfp4:
        columnwise = operand.side == "columnwise"
        stored = torch.ops.zerofp4.dequantize_mxfp8(copy.data, scale, columnwise, "compact", torch.bfloat16)
        return (stored.t() if columnwise else stored).to(dtype)
    amax = neutral_amax(copy.data.device)
    return ops.values_of(copy.data, scale, amax, record.block[0], int(E4M3_MAX), False, dtype)


def neutral_amax(device: torch.device) -> torch.Tensor:
    """float32 [1], 2688: with it dequantization's `(scale * amax) * (1/2688)` is the scale itself, for each
    scale. Kept, one for each device.
    """
    kept = _neutral_amaxes.get(device)
    if kept is not None and not torch.compiler.is_compiling():
        return kept
    made = torch.full((1,), E2M1_MAX * E4M3_MAX, dtype=torch.float32, device=device)
    # Inside a CUDA graph it is filled only when the graph runs, and a FakeTensor belongs to its mode.
    if type(made) is torch.Tensor and not torch.compiler.is_compiling() and not ops.is_capturing(device):
        _neutral_amaxes[device] = made
    return made
