"""zerofp4::product_values, zerofp4::scaled_product and zerofp4::add_scaled_product: what the exact backend of
a product is made of. Its operands are dequantized together, which gives alpha as well, and multiplied.
"""

from collections.abc import Sequence

import torch

import zerofp4._C as _C
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import cublaslt
from zerofp4.ops.dequantize import DequantizeItem, check_items, neutral_amax
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.lists import zip_lists
from zerofp4.ops.operator import backend, fake, is_plain_call
from zerofp4.storage import address_of, check_buffer, check_memory

torch.library.define(
    "zerofp4::product_values",
    "(Tensor[] data, Tensor[] scale, Tensor[] amax, int[] block_rows, int[] e4m3_max, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "zerofp4::scaled_product",
    "(Tensor a, Tensor b, Tensor? alpha, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
torch.library.define(
    "zerofp4::add_scaled_product", "(Tensor a, Tensor b, Tensor? alpha, Tensor? bias, Tensor(a!) out) -> ()"
)

Copy = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]
"""data, compact scale, amax, block_rows and e4m3_max of a copy of an NVFP4 record."""

# Values


def product_values(a: Copy, b: Copy, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator, on copies of records, which have checked their buffers."""
    if is_plain_call(a[0]):
        return _run_values([a, b], dtype)
    return torch.ops.zerofp4.product_values(*map(list, zip(a, b, strict=True)), dtype)


def _run_values(copies: Sequence[Copy], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    device = copies[0][0].device
    neutral = neutral_amax(device)
    outputs, operands = [], []
    for data, scale, amax, block_rows, e4m3_max in copies:
        rows, cols = data.shape[0], 2 * data.shape[1]
        out = torch.empty((rows, cols), dtype=dtype, device=device)
        matrix = address_of("data", data), address_of("scale", scale), out.data_ptr(), rows, cols, block_rows
        outputs.append(out)
        operands.append((*matrix, address_of("amax", amax), e4m3_max))
    alpha = torch.empty(1, dtype=torch.float32, device=device)
    _C.product_values(target_of(device), DTYPE_CODES[dtype], operands, neutral.data_ptr(), alpha.data_ptr())
    return (*outputs, alpha)


def _check_values(data, scale, amax, block_rows, e4m3_max, dtype) -> list[Copy]:
    lists = {"data": data, "scale": scale, "amax": amax, "block_rows": block_rows, "e4m3_max": e4m3_max}
    copies = zip_lists(**lists)
    if len(copies) != 2:
        raise ValueError(f"data must have the two operands of a product, got {len(copies)}")
    items = [DequantizeItem(*copy, False) for copy in copies]
    check_items(items, dtype, "compact", ["[0]", "[1]"])
    for i, item in enumerate(items):
        if 0 in item.shape:
            raise ValueError(f"data[{i}] must have elements, got shape {tuple(item.data.shape)}")
    return copies


@backend("product_values")
def _product_values(data, scale, amax, block_rows, e4m3_max, dtype) -> tuple[torch.Tensor, ...]:
    """Of two copies, data uint8 [M, K/2] and compact scales of them as they are stored: their values [M, K]
    without the global scale, and alpha, float32 [1], the product of both global scales. One launch.
    """
    return _run_values(_check_values(data, scale, amax, block_rows, e4m3_max, dtype), dtype)


@fake("product_values")
def _(data, scale, amax, block_rows, e4m3_max, dtype) -> tuple[torch.Tensor, ...]:
    copies = _check_values(data, scale, amax, block_rows, e4m3_max, dtype)
    outputs = [each[0].new_empty(DequantizeItem(*each, False).shape, dtype=dtype) for each in copies]
    return (*outputs, data[0].new_empty(1, dtype=torch.float32))


# Products


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The operator, on what a caller has checked."""
    if is_plain_call(a):
        return _run(a, b, alpha, bias, out_dtype)
    return torch.ops.zerofp4.scaled_product(a, b, alpha, bias, out_dtype)


def add_scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The operator, on what a caller has checked."""
    if is_plain_call(a):
        _add(a, b, alpha, bias, out)
    else:
        torch.ops.zerofp4.add_scaled_product(a, b, alpha, bias, out)


def write_scaled_product(
    a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """scaled_product(a, b, alpha, None, out.dtype) into out [M, N], contiguous, on what a caller has checked.
    No operator: what is traced has no memory to write to.
    """
    return _run(a, b, alpha, None, out.dtype, out)


def _run(a, b, alpha, bias, out_dtype, out=None) -> torch.Tensor:
    if _by_cublaslt(a, b):
        # The epilogue takes a bias of the output's dtype only, and rounds to the operands' dtype or none.
        # Where rows begin at no multiple of 16 bytes it may round before the bias is added, and after it.
        whole = out_dtype == torch.float32 or b.shape[0] * out_dtype.itemsize % 16 == 0
        plain = bias is None or (bias.dtype == out_dtype and whole)
        direct = out_dtype in (a.dtype, torch.float32) and plain
        made = out
        if made is None or not direct:
            made = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype if direct else torch.float32)
        if cublaslt.multiply(_strided(a), _strided(b), alpha, _of_dtype(bias, made.dtype), made, False):
            return _rounded(made, out_dtype, out)
    return _rounded(_by_torch(a, b, alpha, bias), out_dtype, out)


def _rounded(result: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """In out, if there is one."""
    if out is None:
        return result.to(dtype)
    return out if result is out else out.copy_(result)


def _add(a, b, alpha, bias, out) -> None:
    if _by_cublaslt(a, b):
        own_bias = _of_dtype(bias, torch.float32)
        if cublaslt.multiply(_strided(a), _strided(b), alpha, own_bias, out, True):
            return
    out.add_(_by_torch(a, b, alpha, bias))


def _by_cublaslt(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The rule: on CUDA, where torch's cuBLASLt can be used. A product that it has no algorithm for, and all
    others, are torch's, with a pass each for alpha, bias and rounding.
    """
    return (
        a.device.type == "cuda"
        and a.dtype in cublaslt.INPUT_DTYPES
        and 0 not in (*a.shape, *b.shape)
        and cublaslt.why_no_cublaslt() is None
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


def _check(a, b, alpha, bias, out_dtype) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must be matrices with as many columns, got shapes {shapes}")
    if a.dtype not in WEIGHT_DTYPES or b.dtype != a.dtype or b.device != a.device:
        found = f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        raise ValueError(f"a and b must be of one dtype of {WEIGHT_DTYPES}, on one device, got {found}")
    if out_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"out_dtype must be one of {WEIGHT_DTYPES}, got {out_dtype}")
    for name, operand in (("a", a), ("b", b)):
        check_memory(name, operand)
    if alpha is not None:
        check_buffer("alpha", alpha, (1,), torch.float32, a.device)
    if bias is not None and bias.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"bias must be of one of {WEIGHT_DTYPES}, got {bias.dtype}")
    if bias is not None and (tuple(bias.shape) != (b.shape[0],) or bias.device != a.device):
        found = f"{tuple(bias.shape)} on {bias.device}"
        raise ValueError(f"bias must have shape {(b.shape[0],)} on {a.device}, got {found}")
    if bias is not None:
        check_memory("bias", bias)


@backend("scaled_product")
def _scaled_product(a, b, alpha, bias, out_dtype) -> torch.Tensor:
    """round(alpha * (a b^T) + bias) of a [M, K] and b [N, K]: float32 sums, one rounding to out_dtype."""
    _check(a, b, alpha, bias, out_dtype)
    return _run(a, b, alpha, bias, out_dtype)


@fake("scaled_product")
def _(a, b, alpha, bias, out_dtype) -> torch.Tensor:
    _check(a, b, alpha, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check_out(a, b, out) -> None:
    check_buffer("out", out, (a.shape[0], b.shape[0]), torch.float32, a.device)


@backend("add_scaled_product")
def _add_scaled_product(a, b, alpha, bias, out) -> None:
    """Adds that, unrounded, to out, float32 [M, N]."""
    _check(a, b, alpha, bias, torch.float32)
    _check_out(a, b, out)
    _add(a, b, alpha, bias, out)


@fake("add_scaled_product")
def _(a, b, alpha, bias, out) -> None:
    _check(a, b, alpha, bias, torch.float32)
    _check_out(a, b, out)
