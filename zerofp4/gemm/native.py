"""The native backend: torch's scaled_mm on FP4 tensor cores."""

import torch
from torch.nn import functional as F

from zerofp4 import ops
from zerofp4.gemm.operand import Operand
from zerofp4.layout import round_up
from zerofp4.storage import check_memory

CONTRACTION_MULTIPLE, ROWS_MULTIPLE = 32, 16
"""What cuBLASLt's block-scaled products ask of the contraction and of the rows of b."""


def why_not(device: torch.device) -> str | None:
    """Why the backend cannot run on a device; None where it can. On meta tensors it checks, as torch does."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if device.type == "meta" or ops.has_fp4_tensor_cores(device):
        return None
    return f"it needs FP4 tensor cores (compute capability 10.0 or newer), the operands are on {device}"


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """[rows of a, rows of b] in out_dtype, with the global scales."""
    contraction = round_up(max(a.shape[1], b.shape[1]), CONTRACTION_MULTIPLE)
    rows = round_up(b.shape[0], ROWS_MULTIPLE)
    left, right = codes(a, a.shape[0], contraction), codes(b, rows, contraction)
    (*scaling_a, swizzle_a), (*scaling_b, swizzle_b) = _scaling(a), _scaling(b)
    options = {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "output_dtype": out_dtype}
    out = F.scaled_mm(left, right.t(), *scaling_a, *scaling_b, **options)
    return out if rows == b.shape[0] else out[:, : b.shape[0]].contiguous()


def codes(operand: Operand, rows: int, contraction: int) -> torch.Tensor:
    """The elements padded with zeros to [rows, contraction], row-major, in the dtype that scaled_mm takes."""
    data = operand.copy.data
    check_memory(f"{operand.side}_data", data)  # scaled_mm does not ask
    raw = data.view(torch.uint8)
    if not operand.is_nvfp4 and operand.side == "columnwise":
        raw = raw.t().contiguous()  # MXFP8 stores this copy as it stores the other
    width = contraction // 2 if operand.is_nvfp4 else contraction
    if raw.shape != (rows, width):
        raw = F.pad(raw, (0, width - raw.shape[1], 0, rows - raw.shape[0]))
    return raw.view(torch.float4_e2m1fn_x2 if operand.is_nvfp4 else torch.float8_e4m3fn)


def _scaling(operand: Operand) -> tuple[list[torch.Tensor], list, list]:
    """Scales, what they scale, and their layouts: one of each, and of the global scale too, which scaled_mm
    multiplies into alpha on the device.
    """
    swizzled = ops.padded_scale(operand.record, operand.side, "swizzled")
    check_memory(f"{operand.side}_scale_swizzled", swizzled)
    if not operand.is_nvfp4:
        return [swizzled], [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4]
    scaling = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    layouts = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return [swizzled, operand.global_scale()], scaling, layouts
