"""The exact backend of a product: values and alpha in one launch, multiplied by cuBLASLt or by torch."""

import functools

import torch

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


def scaled_product(a, b, alpha, bias, out_dtype: torch.dtype) -> torch.Tensor:
    """round(alpha * (a b^T) + bias) of a [M, K] and b [N, K], in float32. alpha: float32 [1] or None."""
    run = _run if is_plain_call(a) else torch.ops.zerofp4.scaled_product
    return run(a, b, alpha, bias, out_dtype)


@backend("scaled_product")
def _run(a, b, alpha, bias, out_dtype) -> torch.Tensor:
    if _by_cublaslt(a, b):
        # The epilogue takes a bias of the output's dtype only, and rounds to the operands' dtype or none.
        # Where rows begin at no multiple of 16 bytes it may round before the bias is added, and after it.
        whole = out_dtype == torch.float32 or b.shape[0] * out_dtype.itemsize % 16 == 0
        plain = bias is None or (bias.dtype == out_dtype and whole)
        direct = out_dtype in (a.dtype, torch.float32) and plain
        out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype if direct else torch.float32)
        if multiply(_strided(a), _strided(b), alpha, _of_dtype(bias, out.dtype), out, False):
            return out.to(out_dtype)
    return _by_torch(a, b, alpha, bias).to(out_dtype)


def add_scaled_product(a, b, alpha, bias, out: torch.Tensor) -> None:
    """Add that, unrounded, to out, float32 [M, N]."""
    add = _add if is_plain_call(a) else torch.ops.zerofp4.add_scaled_product
    add(a, b, alpha, bias, out)


@backend("add_scaled_product")
def _add(a, b, alpha, bias, out) -> None:
    if _by_cublaslt(a, b):
        own_bias = _of_dtype(bias, torch.float32)
        if multiply(_strided(a), _strided(b), alpha, own_bias, out, True):
            return
    out.add_(_by_torch(a, b, alpha, bias))


def _by_cublaslt(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The rule: on CUDA, where torch's cuBLASLt can be used. A product that it has no algorithm for, and all
    others, are torch's, with a pass each for alpha, bias and rounding.
    """
    return (
        a.device.type == "cuda"
        and a.dtype in INPUT_DTYPES
        and 0 not in (*a.shape, *b.shape)
        and why_no_cublaslt() is None
    )


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def _of_dtype(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias.to(dtype).resolve_neg().contiguous()


def _by_torch(a, b, alpha, bias) -> torch.Tensor:
    """float32, unrounded."""
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):  # which would round sums to its dtype
            return _by_torch(a, b, alpha, bias)
    if a.device.type == "cuda":
        out = torch.mm(a, b.t(), out_dtype=torch.float32)
    else:
        out = torch.mm(a.float(), b.float().t())
    if alpha is not None:
        out.mul_(alpha)
    return out if bias is None else out.add_(bias)


# cuBLASLt, the copy of it that torch has loaded: its epilogue reads alpha on the device

INPUT_DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def _version() -> int:
    """Raises RuntimeError where the library cannot be used."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    return _C.load_cublaslt(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")


@functools.cache
def why_no_cublaslt() -> str | None:
    """Why products are not cuBLASLt's in this process; None where they are."""
    try:
        _version()
    except RuntimeError as error:
        return str(error)
    return None


def products_by() -> str:
    """For build_info(): what multiplies the values of the exact backend."""
    reason = why_no_cublaslt()
    if reason is not None:
        return f"torch.mm: {reason}"
    major, rest = divmod(_version(), 10000)
    return f"cuBLASLt {major}.{rest // 100}.{rest % 100}"


def multiply(a, b, alpha, bias, out: torch.Tensor, accumulate: bool) -> bool:
    """alpha a b^T + bias into out, rounded once, or added to it; False if cuBLASLt has no algorithm for that.

    a [M, K], b [N, K] of one of INPUT_DTYPES, row-major or transposes; out [M, N] contiguous, of float32 or
    their dtype; bias of out's dtype. No size is 0.
    """
    transposed = (not a.is_contiguous(), not b.is_contiguous())
    alignments = (_alignment(a), _alignment(b), 0 if bias is None else _alignment(bias), _alignment(out))
    codes = (DTYPE_CODES[a.dtype], DTYPE_CODES[out.dtype])
    problem = (*out.shape, a.shape[1], *codes, *transposed, accumulate, alignments)
    product = _product(out.device.index, *problem)
    if product is None:
        return False
    # Given back when it goes out of scope, in the order of the stream.
    workspace = torch.empty(product.workspace, dtype=torch.uint8, device=out.device)
    addresses = map(address_of, ("a", "b", "alpha", "bias", "out"), (a, b, alpha, bias, out))
    product.run(target_of(out.device), *addresses, workspace.data_ptr())
    return True


def _alignment(tensor: torch.Tensor) -> int:
    """Of its address; 256 is the largest that an algorithm asks for."""
    place = tensor.data_ptr()
    return min(place & -place, 256)


@functools.lru_cache(maxsize=4096)  # tokens that vary from step to step make new sizes without end
def _product(index: int, *problem) -> "_C.Product | None":
    """Its algorithm is asked for once: the heuristic takes longer than many products."""
    check_cuda(index)
    return _C.find_product(index, *problem)
