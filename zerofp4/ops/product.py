"""Products, by cuBLASLt or torch, and the factors of exact ones: values and alpha in one launch."""

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional as F

import zerofp4._C as _C
from zerofp4.ops.dequantize import neutral_amax
from zerofp4.ops.device import DTYPE_CODES, check_cuda, target_of
from zerofp4.ops.schemas import backend, is_plain_call, new_factors
from zerofp4.storage import address_of

Copy = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]
"""data, compact scale, amax, block_rows and e4m3_max of a copy of an NVFP4 record."""

# Values


def product_values(a: Copy, b: Copy, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values [M, K] of a, those of b, alpha): alpha, float32 [1], is the product of the global scales."""
    run = _product_values if is_plain_call(a[0]) else torch.ops.zerofp4.product_values
    return run(*map(list, zip(a, b, strict=True)), dtype)


@backend("product_values")
def _product_values(*arguments) -> tuple[torch.Tensor, ...]:
    *outputs, alpha = results = new_factors(*arguments)
    neutral, operands = neutral_amax(alpha.device), []
    for data, scale, amax, block_rows, e4m3_max, out in zip(*arguments[:-1], outputs, strict=True):
        places = address_of("data", data), address_of("scale", scale), out.data_ptr()
        operands.append((*places, *out.shape, block_rows, address_of("amax", amax), e4m3_max))
    code = DTYPE_CODES[outputs[0].dtype]
    _C.product_values(target_of(alpha.device), code, operands, neutral.data_ptr(), alpha.data_ptr())
    return results


# Products


def product_alpha(amaxes: list[torch.Tensor], e4m3_maxes: list[int]) -> torch.Tensor:
    """float32 [1], the product of both global scales, in one launch."""
    run = _product_alpha if is_plain_call(amaxes[0]) else torch.ops.zerofp4.product_alpha
    return run(amaxes, e4m3_maxes)


@backend("product_alpha")
def _product_alpha(amaxes, e4m3_maxes) -> torch.Tensor:
    alpha = amaxes[0].new_empty(1)
    # The kernel writes no values for operands without elements.
    places = map(address_of, ("amax", "amax"), amaxes)
    operands = [(0, 0, 0, 0, 0, 1, *each) for each in zip(places, e4m3_maxes, strict=True)]
    code = DTYPE_CODES[torch.float32]
    _C.product_values(target_of(alpha.device), code, operands, 0, alpha.data_ptr())
    return alpha


def scaled_product(
    a, b, alpha, bias, out_dtype: torch.dtype, scales: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """round(alpha * (a b^T) + bias) of a [M, K] and b [N, K], in float32. alpha: float32 [1] or None.

    scales: None for plain matrices. For NVFP4 (packed uint8 [rows, K/2]) and MXFP8 (E4M3), the swizzled
        scales of a and b, which FP4 tensor cores read; K is a multiple of 32 and N of 16.
    """
    run = _run if is_plain_call(a) else torch.ops.zerofp4.scaled_product
    return run(a, b, alpha, bias, out_dtype, scales)


@backend("scaled_product")
def _run(a, b, alpha, bias, out_dtype, scales=None) -> torch.Tensor:
    if _by_cublaslt(a, b, scales):
        bias_dtype = None if bias is None else bias.dtype
        for dtype, adds_bias in epilogues(a.dtype, b.shape[0], out_dtype, bias_dtype):
            out = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
            own_bias = _of_dtype(bias, dtype) if adds_bias else None
            if multiply(_strided(a), _strided(b), alpha, own_bias, out, False, scales):
                return _finished(out, None if adds_bias else bias, out_dtype)
    return _by_torch(a, b, alpha, bias, out_dtype, scales)


def epilogues(
    inputs: torch.dtype, rows: int, out_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> list[tuple[torch.dtype, bool]]:
    """What to ask cuBLASLt for until it has an algorithm: the dtype of its output, and whether it adds the
    bias. A pass over a float32 output does the rest. rows: of b.
    """
    has_bias = bias_dtype is not None
    # The epilogue takes a bias of the output's dtype only, and rounds to the dtype of plain operands or not
    # at all. If rows do not begin at multiples of 16 bytes, it may round before and after it adds the bias.
    whole = out_dtype == torch.float32 or rows * out_dtype.itemsize % 16 == 0
    fits = not has_bias or (bias_dtype == out_dtype and whole)
    if inputs not in SCALED_DTYPES:
        return [(out_dtype if fits and out_dtype in (inputs, torch.float32) else torch.float32, has_bias)]
    if has_bias and out_dtype == torch.float32:  # to which it would add bfloat16
        fits = False
    return list(dict.fromkeys([(out_dtype, has_bias)] * fits + [(torch.float32, False)]))


def add_scaled_product(
    a, b, alpha, bias, out: torch.Tensor, scales: Sequence[torch.Tensor] | None = None
) -> None:
    """Add scaled_product(), unrounded, to out, float32 [M, N]."""
    add = _add if is_plain_call(a) else torch.ops.zerofp4.add_scaled_product
    add(a, b, alpha, bias, out, scales)


@backend("add_scaled_product")
def _add(a, b, alpha, bias, out, scales=None) -> None:
    if (bias is None or not scales) and _by_cublaslt(a, b, scales):
        own_bias = _of_dtype(bias, torch.float32)
        if multiply(_strided(a), _strided(b), alpha, own_bias, out, True, scales):
            return
    out.add_(_run(a, b, alpha, bias, torch.float32, scales))


def _by_cublaslt(a: torch.Tensor, b: torch.Tensor, scales: Sequence[torch.Tensor] | None) -> bool:
    """On CUDA, if torch's cuBLASLt can be used. torch makes the products that it has no algorithm for."""
    return (
        a.device.type == "cuda"
        and a.dtype in _INPUTS
        and 0 not in (*a.shape, *b.shape)
        and why_no_cublaslt() is None
        and all(scale.data_ptr() % 16 == 0 for scale in scales or ())
    )


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def _of_dtype(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype).resolve_neg().contiguous()


def _finished(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """round(product + bias), added in float32, in one pass."""
    if bias is None:
        return product.to(dtype)
    return torch.add(product, bias, out=torch.empty_like(product, dtype=dtype))


def _by_torch(a, b, alpha, bias, out_dtype, scales) -> torch.Tensor:
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):  # which would round sums to its dtype
            return _by_torch(a, b, alpha, bias, out_dtype, scales)
    if scales:
        made_dtype = out_dtype if bias is None else torch.float32
        return _finished(_scaled_mm(a, b, alpha, made_dtype, scales), bias, out_dtype)
    if a.device.type == "cuda":
        out = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:
        out = torch.mm(a.float(), b.float().t())
    if alpha is not None:
        out.mul_(alpha)
    return _finished(out, bias, out_dtype)


def _scaled_mm(a, b, alpha, out_dtype, scales) -> torch.Tensor:
    """torch's scaled_mm takes a global scale for each operand; alpha is a's."""
    given, kinds = [[scale] for scale in scales], [F.ScalingType.BlockWise1x32]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4]
    if alpha is not None:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
        given = [[scales[0], alpha], [scales[1], torch.ones_like(alpha)]]
        kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        swizzles.append(F.SwizzleType.NO_SWIZZLE)
    options = {"swizzle_a": swizzles, "swizzle_b": swizzles, "output_dtype": out_dtype}
    return F.scaled_mm(a, b.t(), given[0], kinds, given[1], kinds, **options)


# cuBLASLt, the copy of it that torch has loaded: its epilogue reads alpha on the device

SCALED_DTYPES = (torch.uint8, torch.float8_e4m3fn)
"""Of operands with scales: packed NVFP4 codes, MXFP8 elements."""
_INPUTS = {torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3, torch.float8_e4m3fn: 4}


@functools.cache
def _version() -> int:
    """Raises RuntimeError if the library cannot be used."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    return _C.load_cublaslt(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")


@functools.cache
def why_no_cublaslt() -> str | None:
    """Why this process cannot use cuBLASLt, or None."""
    try:
        _version()
    except RuntimeError as error:
        return str(error)
    return None


def products_by() -> str:
    """What multiplies, for build_info()."""
    reason = why_no_cublaslt()
    if reason is not None:
        return f"torch.mm: {reason}"
    major, rest = divmod(_version(), 10000)
    return f"cuBLASLt {major}.{rest // 100}.{rest % 100}"


def multiply(a, b, alpha, bias, out: torch.Tensor, accumulate: bool, scales=None) -> bool:
    """alpha a b^T + bias into out, rounded once, or added to it. False if cuBLASLt has no algorithm for that.

    a [M, K], b [N, K]: row-major or transposed, or with scales as of scaled_product. out: [M, N], contiguous.
    bias: of out's dtype. No size is 0.
    """
    packed = 1 + (a.dtype == torch.uint8)
    transposed = (not a.is_contiguous(), not b.is_contiguous())
    alignments = (_alignment(a), _alignment(b), 0 if bias is None else _alignment(bias), _alignment(out))
    codes = (_INPUTS[a.dtype], DTYPE_CODES[out.dtype])
    problem = (*out.shape, a.shape[1] * packed, *codes, *transposed, accumulate, alignments)
    product = _product(out.device.index, *problem)
    if product is None:
        return False
    # Freed at the end of the scope, in stream order.
    workspace = torch.empty(product.workspace, dtype=torch.uint8, device=out.device)
    names = ("a", "b", "scales[0]", "scales[1]", "alpha", "bias", "out")
    tensors = (a, b, *(scales or (None, None)), alpha, bias, out)
    product.run(target_of(out.device), *map(address_of, names, tensors), workspace.data_ptr())
    return True


def _alignment(tensor: torch.Tensor) -> int:
    """Of its address, at most 256, the largest that an algorithm asks for."""
    place = tensor.data_ptr()
    return min(place & -place, 256)


@functools.lru_cache(maxsize=4096)  # varying numbers of tokens make new sizes
def _product(index: int, *problem) -> "_C.Product | None":
    """The algorithm, asked for once: the heuristic takes longer than many products."""
    check_cuda(index)
    return _C.find_product(index, *problem)
