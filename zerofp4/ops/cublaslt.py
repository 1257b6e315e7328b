"""cuBLASLt, the copy of it that torch has loaded: products whose epilogue reads alpha on the device."""

import functools

import torch

import zerofp4._C as _C
from zerofp4.ops.device import DTYPE_CODES, check_cuda, target_of
from zerofp4.storage import address_of

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


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
) -> bool:
    """alpha a b^T + bias into out, rounded once, or added to it; on the current stream, without waiting.

    a [M, K], b [N, K] of one of INPUT_DTYPES, row-major or the transposes of what is; out [M, N] contiguous,
    of float32 or their dtype; bias of out's dtype. No size is 0. False, and nothing done, where cuBLASLt has
    no algorithm for that.
    """
    transposed = (not a.is_contiguous(), not b.is_contiguous())
    alignments = (_alignment(a), _alignment(b), 0 if bias is None else _alignment(bias), _alignment(out))
    codes = (DTYPE_CODES[a.dtype], DTYPE_CODES[out.dtype])
    index = out.device.index
    product = _product(index, *out.shape, a.shape[1], *codes, *transposed, accumulate, alignments)
    if product is None:
        return False
    # Given back when it goes out of scope, in the order of the stream.
    workspace = torch.empty(product.workspace, dtype=torch.uint8, device=out.device)
    product.run(
        target_of(out.device),
        address_of("a", a),
        address_of("b", b),
        address_of("alpha", alpha),
        address_of("bias", bias),
        address_of("out", out),
        workspace.data_ptr(),
    )
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
