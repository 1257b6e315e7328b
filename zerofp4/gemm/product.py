"""gemm: the product of two quantized matrices."""

import re
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
    """Multiply two quantized matrices: a [M, K] times the transpose of b [N, K], to a plain [M, N].

    a, b: both NVFP4 or both MXFP8: tensors or records, which stand for their rowwise copies, flattened to
        [rows, last dimension]; or an `Operand` of one, which names the copy. Columnwise copies must carry the
        same Hadamard transform, which then cancels, or none.
    out_dtype: float32, bfloat16 or float16; by default what the logical dtypes of a and b promote to.
    bias: [N] of such a dtype.
    accumulate_into: float32 [M, N], contiguous; the unrounded result is added to it, and it is returned.
    backend: "native" multiplies on FP4 tensor cores (compute capability 10.0 or newer), with the contraction
        and N padded with zeros to multiples of 32 and 16. "exact" multiplies the exact values, in bfloat16 on
        CUDA and in float32 on the CPU. "auto" is native if the hardware and its libraries can multiply these
        operands.

    Examples:
        >>> a, b = zerofp4.quantize(torch.randn(32, 64)), zerofp4.quantize(torch.randn(48, 64))
        >>> product = zerofp4.gemm(a, b, out_dtype=torch.float32)  # [32, 48]

    The result is the float32 sum of the products of elements and block scales, times alpha, plus bias in
    float32, rounded once to out_dtype. alpha is (amax_a * (1/2688)) * (amax_b * (1/2688)) in float32. With
    another e4m3_max of four over six, 6 * e4m3_max replaces 2688; MXFP8 has no alpha. Backends differ in the
    order of the sums only. The result has no autograd history.

    On CUDA both backends are products of cuBLASLt, which takes alpha, bias and accumulation into its
    epilogue, where sums may be fused with them (one rounding less). For what cuBLASLt refuses, and if
    build_info() names torch instead, they cost a pass each. Nothing waits for the device.

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
    run = exact.multiply
    if used == "native" and 0 not in (*shape, left.shape[1]):
        falls_back = backend == "auto" and ops.is_plain_call(left.copy.data)
        run = _native_or_exact if falls_back else native.multiply
    try:
        return run(left, right, out_dtype, bias, accumulate_into)
    except RuntimeError:
        left.record.check_memory("a")  # by name, if a buffer was freed
        right.record.check_memory("b")
        raise


_REFUSALS = re.compile("CUBLAS_STATUS_(NOT_SUPPORTED|INVALID_VALUE)")
_refused: set[tuple] = set()


def _native_or_exact(a: Operand, b: Operand, out_dtype: torch.dtype, bias, accumulate_into) -> torch.Tensor:
    """The native product, or the exact one if torch's library refuses it: then it is not asked again."""
    problem = a.device, a.shape, b.shape, a.is_nvfp4, out_dtype
    if problem not in _refused:
        try:
            return native.multiply(a, b, out_dtype, bias, accumulate_into)
        except RuntimeError as error:
            if not _REFUSALS.search(str(error)):
                raise
            _refused.add(problem)
    return exact.multiply(a, b, out_dtype, bias, accumulate_into)


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
