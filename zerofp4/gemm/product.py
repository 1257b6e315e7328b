"""gemm: the product of two quantized matrices."""

from typing import Any

import torch

from zerofp4 import ops
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.gemm import exact, native
from zerofp4.gemm.operand import Operand, as_operand, check_pair
from zerofp4.storage import check_buffer, check_plain

BACKENDS = ("auto", "native", "exact")


def gemm(
    a: Any,
    b: Any,
    *,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    accumulate_into: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """a b^T of quantized a [M, K] and b [N, K], both NVFP4 or both MXFP8: a plain [M, N], without history.

    Float32 sums of the products of elements and block scales, times alpha =
    (amax_a * (1/2688)) * (amax_b * (1/2688)) in float32, plus bias in float32, then one rounding to
    out_dtype. With another e4m3_max of four over six, 6 * e4m3_max replaces 2688; MXFP8 has no alpha.
    Backends differ in the order of the sums only.

    a, b: tensors or records, which stand for their rowwise copies, flattened to [rows, last dimension]; or an
    `Operand` of one, which names the copy. Columnwise copies must carry the same Hadamard transform, which
    then cancels, or none.
    out_dtype: float32, bfloat16 or float16; by default what the logical dtypes of a and b promote to.
    bias: [N] of such a dtype.
    accumulate_into: float32 [M, N], contiguous; the unrounded result is added to it, and it is returned.
    backend: "native" is torch's scaled_mm on FP4 tensor cores (compute capability 10.0 or newer), with the
    contraction and N padded with zeros to multiples of 32 and 16; "exact" a product of the exact values, in
    bfloat16 on CUDA and in float32 on the CPU; "auto" native if that exists. On CUDA the exact product is
    cuBLASLt's, which takes alpha, bias and accumulation into its epilogue, where sums may be fused with them
    (one rounding less). If build_info() names torch.mm instead, and for sizes that cuBLASLt has no algorithm
    for, they cost a pass each. Nothing waits for the device.

    Raises TypeError for what is not quantized or an unknown dtype, ValueError for operands that do not match
    or a missing copy, RuntimeError for a backend that the hardware lacks and for an operand whose memory was
    freed.
    """
    left, right = as_operand("a", a), as_operand("b", b)
    check_pair(left, right)
    shape = (left.shape[0], right.shape[0])
    out_dtype = _out_dtype(left, right, out_dtype, accumulate_into)
    _check_bias(bias, shape[1], left.device)
    if accumulate_into is not None:
        check_buffer("accumulate_into", accumulate_into, shape, torch.float32, left.device)
    if ops.is_plain_call(left.copy.data):  # what is traced has no memory
        for name, given in (("bias", bias), ("accumulate_into", accumulate_into)):
            if given is not None:
                check_plain(name, given)
    used = chosen_backend(left.device, backend)
    bias = None if bias is None else bias.detach()
    try:
        if used == "exact" or 0 in (*shape, left.shape[1]):
            return exact.multiply(left, right, out_dtype, bias, accumulate_into)
        plain = bias is None and accumulate_into is None
        result = native.multiply(left, right, out_dtype if plain else torch.float32)
    except RuntimeError:
        left.record.check_memory("a")  # by name, if a buffer was freed
        right.record.check_memory("b")
        raise
    if bias is not None:
        result.add_(bias)
    if accumulate_into is not None:
        return accumulate_into.add_(result)
    return result.to(out_dtype)


def chosen_backend(device: torch.device, backend: str = "auto") -> str:
    """The backend that gemm uses on `device`. Raises ValueError for an unknown name, RuntimeError where the
    one asked for cannot run there.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "auto":
        return "native" if ops.has_fp4_tensor_cores(device) and native.why_not(device) is None else "exact"
    reason = native.why_not(device) if backend == "native" else None
    if reason is not None:
        raise RuntimeError(f"backend 'native' cannot run: {reason}; backend 'exact' runs everywhere")
    return backend


def _out_dtype(a: Operand, b: Operand, asked: torch.dtype | None, accumulate_into) -> torch.dtype:
    if asked is not None and asked not in WEIGHT_DTYPES:
        raise TypeError(f"out_dtype must be one of {WEIGHT_DTYPES}, got {asked}")
    if accumulate_into is not None:
        if asked not in (None, torch.float32):
            raise ValueError(
                f"out_dtype must be torch.float32, or not given, with accumulate_into, got {asked}"
            )
        return torch.float32
    return torch.promote_types(a.record.dtype, b.record.dtype) if asked is None else asked


def _check_bias(bias: torch.Tensor | None, size: int, device: torch.device) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or bias.dtype not in WEIGHT_DTYPES:
        found = getattr(bias, "dtype", type(bias).__name__)
        raise TypeError(f"bias must be a tensor of one of {WEIGHT_DTYPES}, got {found}")
    if tuple(bias.shape) != (size,) or bias.device != device:
        raise ValueError(
            f"bias must have shape {(size,)} on {device}, got {tuple(bias.shape)} on {bias.device}"
        )
