"""The exact backend: a product of values that bfloat16 holds, for hardware without FP4 tensor cores.

An E2M1 value has at most 2 significant bits and an E4M3 scale 4, so their product has at most 6 and is exact
in bfloat16, which has 8, and in float16, whose range from 2^-10 to 2688 it does not leave. MXFP8's elements
have 4, times a power of two: exact in bfloat16 from 2^-126 on. The kernel that makes the values on CUDA also
writes alpha, which cuBLASLt's epilogue reads.
"""

import torch

from zerofp4 import ops
from zerofp4.gemm.operand import Operand


def multiply(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    accumulate_into: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows of a, rows of b] in out_dtype, or accumulate_into with that added in float32."""
    left, right, alpha = factors(a, b, factor_dtype(a, out_dtype))
    if accumulate_into is None:
        return ops.scaled_product(left, right, alpha, bias, out_dtype)
    ops.add_scaled_product(left, right, alpha, bias, accumulate_into)
    return accumulate_into


def factor_dtype(operand: Operand, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply in: float32 on the CPU; on CUDA bfloat16, or float16 for NVFP4 to float16."""
    if operand.device.type != "cuda":
        return torch.float32
    return torch.float16 if operand.is_nvfp4 and out_dtype == torch.float16 else torch.bfloat16


def factors(
    a: Operand, b: Operand, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(values of a, values of b, alpha): [rows, contraction] without their global scales, the last group of
    a transform completed, and the float32 [1] that is the product of those; None for no factor.
    """
    if a.is_nvfp4 and 0 not in (*a.shape, *b.shape):
        left, right, alpha = ops.product_values(_copy(a), _copy(b), dtype)
    else:
        left, right, alpha = _apart(a, dtype), _apart(b, dtype), None
    return left.t() if a.is_transposed else left, right.t() if b.is_transposed else right, alpha


def _copy(operand: Operand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    copy, record = operand.copy, operand.record
    return copy.data, ops.compact_scale(record, operand.side), copy.amax, record.block[0], record.e4m3_max


def _apart(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Values of an MXFP8 operand; of an NVFP4 product without elements or sums only their shape."""
    copy = operand.copy
    if operand.is_nvfp4:
        return copy.data.new_empty((copy.data.shape[0], 2 * copy.data.shape[1]), dtype=dtype)
    columnwise = operand.side == "columnwise"
    scale = ops.compact_scale(operand.record, operand.side)
    stored = torch.ops.zerofp4.dequantize_mxfp8(copy.data, scale, columnwise, "compact", torch.bfloat16)
    return (stored.t() if columnwise else stored).to(dtype)
