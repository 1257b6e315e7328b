"""The native backend: FP4 tensor cores multiply codes and swizzled scales. By cuBLASLt, or torch's scaled_mm
where that has no algorithm.
"""

import torch
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.gemm.operand import Operand
from zerofp4.layout import round_up
from zerofp4.storage import check_memory

CONTRACTION_MULTIPLE, ROWS_MULTIPLE = 32, 16
"""What cuBLASLt's block-scaled products ask of the contraction and of the rows of b."""


def why_not(device: torch.device) -> str | None:
    """Why the backend cannot run on a device; None where it can. Meta tensors show shapes."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if device.type == "meta" or ops.has_fp4_tensor_cores(device):
        return None
    return f"it needs FP4 tensor cores (compute capability 10.0 or newer), the operands are on {device}"


def multiply(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    accumulate_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows of a, rows of b] in out_dtype, or accumulate_into with that added in float32."""
    left, right, alpha, scales = factors(a, b)
    count, padding = b.shape[0], right.shape[0] - b.shape[0]
    if bias is not None and padding:
        bias = F.pad(bias, (0, padding))
    if accumulate_into is not None and not padding:
        ops.add_scaled_product(left, right, alpha, bias, accumulate_into, scales)
        return accumulate_into
    out = ops.scaled_product(left, right, alpha, bias, out_dtype, scales)[:, :count]
    return out.contiguous() if accumulate_into is None else accumulate_into.add_(out)


def factors(
    a: Operand, b: Operand
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """(codes of a, codes of b, alpha, their scales), as ops.scaled_product takes them, padded with zeros."""
    contraction = round_up(max(a.shape[1], b.shape[1]), CONTRACTION_MULTIPLE)
    left = codes(a, a.shape[0], contraction)
    right = codes(b, round_up(b.shape[0], ROWS_MULTIPLE), contraction)
    alpha = None
    if a.is_nvfp4:
        alpha = ops.product_alpha([a.copy.amax, b.copy.amax], [a.record.e4m3_max, b.record.e4m3_max])
    scales = [ops.padded_scale(each.record, each.side, "swizzled") for each in (a, b)]
    for each, scale in zip((a, b), scales, strict=True):
        check_memory(f"{each.side}_scale_swizzled", scale)
    return left, right, alpha, scales


def codes(operand: Operand, rows: int, contraction: int) -> torch.Tensor:
    """The elements padded with zeros to [rows, contraction], row-major: packed uint8, or E4M3."""
    data = operand.copy.data
    check_memory(f"{operand.side}_data", data)  # scaled_mm does not ask
    raw = data.view(torch.uint8)
    if not operand.is_nvfp4 and operand.side == "columnwise":
        raw = raw.t().contiguous()  # MXFP8 stores this copy as it stores the other
    width = contraction // 2 if operand.is_nvfp4 else contraction
    if raw.shape != (rows, width):
        raw = F.pad(raw, (0, width - raw.shape[1], 0, rows - raw.shape[0]))
    return raw if operand.is_nvfp4 else raw.view(torch.float8_e4m3fn)
