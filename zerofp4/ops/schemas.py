"""Every operator of zerofp4: its schema and its fake implementation.

Backends, registered in the other files, share the checks. Public functions have checked records and values;
this checks the tensors that a user gives beside them (amaxes, skip, m_splits, scales).
"""

from collections.abc import Callable

import torch

from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS, BLOCK, SCALE_DTYPE
from zerofp4.layout import ceil_div, check_matrix, round_up, scale_shape
from zerofp4.storage import BUFFERS, check_buffer

LARGEST_ROWS = 2**31 - 1

# Registration

_backends: dict[str, tuple[torch.library.Library, Callable]] = {}
"""By operator: the library that keeps its implementation registered, and the implementation."""


def operator(name: str, schema: str) -> Callable[[Callable], Callable]:
    """Defines an operator with a fake implementation."""
    torch.library.define(f"zerofp4::{name}", schema)
    return torch.library.register_fake(f"zerofp4::{name}")


def backend(name: str) -> Callable[[Callable], Callable]:
    """Registers the CPU and CUDA implementation of an operator."""

    def register(function: Callable) -> Callable:
        library = torch.library.Library("zerofp4", "FRAGMENT")
        torch.library.impl(f"zerofp4::{name}", ("cpu", "cuda"), lib=library)(function)
        _backends[name] = library, function
        return function

    return register


def without_backend(name: str) -> Callable:
    """Unregisters the implementation of an operator, and returns it."""
    _, call = _backends.pop(name)
    return call


def is_plain_call(x: torch.Tensor) -> bool:
    """Whether x is plain and no trace or mode is active, so that callers may skip the dispatcher."""
    return (
        (type(x) is torch.Tensor or type(x) is torch.nn.Parameter)
        and (x.is_cpu or x.is_cuda)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
    )


# Quantize

_OPTIONS = "Tensor? rng_state, int e4m3_max, str error"
_BUFFERS = (
    "Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale, Tensor(c!)? rowwise_scale_expanded, "
    "Tensor(d!)? rowwise_scale_swizzled, Tensor(e!)? columnwise_data, Tensor(f!)? columnwise_scale, "
    "Tensor(g!)? columnwise_scale_expanded, Tensor(h!)? columnwise_scale_swizzled, Tensor(i!) amax, "
    "Tensor(j!)? columnwise_amax"
)


def count_of(x: torch.Tensor) -> int:
    """The number of matrices in x, and of its amaxes."""
    return 1 if x.dim() == 2 else x.shape[0]


def check_skip(skip: torch.Tensor | None, device: torch.device) -> None:
    if skip is not None:
        check_buffer("skip", skip, (1,), torch.float32, device)


def check_amaxes(device, count: int, amax, columnwise_amax, hadamard: bool, has_rowwise: bool) -> None:
    """Of amaxes to use instead of the input's own, `count` of each."""
    for name, given in (("amax", amax), ("columnwise_amax", columnwise_amax)):
        if given is not None:
            check_buffer(name, given, (count,), torch.float32, device)
    if columnwise_amax is not None and not hadamard:
        raise ValueError(
            "columnwise_amax is that of the Hadamard transform, but hadamard is False: both copies have amax"
        )
    if amax is not None and hadamard and not has_rowwise:
        raise ValueError("amax is that of the rowwise copy, but none is asked for: give columnwise_amax")


@operator(
    "quantize",
    "(Tensor x, int block_rows, Tensor? given_amax, Tensor? given_columnwise_amax, bool hadamard, "
    f"bool random_signs, {_OPTIONS}, Tensor? skip, {_BUFFERS}) -> ()",
)
def _(x, block_rows, amax, columnwise_amax, hadamard, signs, state, e4m3_max, error, skip, *buffers) -> None:
    check_skip(skip, x.device)
    check_amaxes(x.device, count_of(x), amax, columnwise_amax, hadamard, buffers[0] is not None)


@operator("quantize_dequantize", f"(Tensor x, int block_rows, Tensor? given_amax, {_OPTIONS}) -> Tensor")
def new_rounded(x, block_rows, given_amax, rng_state, e4m3_max, error) -> torch.Tensor:
    check_matrix(*x.shape[-2:], columnwise=False)
    check_amaxes(x.device, count_of(x), given_amax, None, False, True)
    return torch.empty_like(x)


@operator(
    "quantize_mxfp8",
    "(Tensor x, Tensor? skip, "
    "Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale, Tensor(c!)? rowwise_scale_swizzled, "
    "Tensor(d!)? columnwise_data, Tensor(e!)? columnwise_scale, Tensor(f!)? columnwise_scale_swizzled) -> ()",
)
def _(x, skip, *buffers) -> None:
    check_skip(skip, x.device)


# Groups of rows


def grouped_rows(tokens: int, groups: int) -> tuple[int, int]:
    """Rows of data and of padded scales that suffice for the groups, however the tokens are split."""
    data_rows = round_up(tokens + (BLOCK - 1) * groups, BLOCK)
    scale_rows = round_up(tokens + (ATOM_ROWS - 1) * groups, ATOM_ROWS)
    if scale_rows > LARGEST_ROWS:
        raise ValueError(f"x must have at most {LARGEST_ROWS} rows with their padding, got {scale_rows}")
    return data_rows, scale_rows


def grouped_shapes(tokens: int, groups: int, cols: int) -> dict[str, tuple[int, ...]]:
    """By buffer, its shape in a storage for `groups` groups with `tokens` rows in all."""
    data_rows, scale_rows = grouped_rows(tokens, groups)
    columns = ceil_div(cols, BLOCK)
    across = (scale_rows, round_up(columns, ATOM_COLUMNS))
    along = (round_up(cols, ATOM_ROWS) * (scale_rows // BLOCK),)
    shapes = [(data_rows, cols // 2), (data_rows, columns), across, across]
    shapes += [(cols * (data_rows // 2),), (cols * (data_rows // BLOCK),), along, along]
    return dict(zip(BUFFERS, [*shapes, (groups,), (groups,)], strict=True))


def check_groups(x, splits, amax, columnwise_amax, hadamard: bool, has_rowwise: bool) -> None:
    check_matrix(*x.shape, columnwise=False)
    if splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"m_splits must be a vector of int32 or int64, got {splits.dtype} {tuple(splits.shape)}"
        )
    check_buffer("m_splits", splits, splits.shape, splits.dtype, x.device)
    check_amaxes(x.device, splits.shape[0], amax, columnwise_amax, hadamard, has_rowwise)


@operator(
    "quantize_grouped",
    "(Tensor x, Tensor splits, Tensor? given_amax, Tensor? given_columnwise_amax, bool hadamard, "
    f"bool random_signs, Tensor? rng_state, {_BUFFERS}, Tensor(k!) offsets, Tensor(l!) error) -> ()",
)
def _(x, splits, amax, columnwise_amax, hadamard, random_signs, rng_state, *outputs) -> None:
    check_groups(x, splits, amax, columnwise_amax, hadamard, outputs[0] is not None)


# Dequantize


def values_shape(data: torch.Tensor, columnwise: bool) -> tuple[int, ...]:
    """(M, K) of packed codes [M, K/2], or columnwise [K, M/2]; of a stack with a leading E."""
    *stack, rows, half = data.shape
    return (*stack, 2 * half, rows) if columnwise else (*stack, rows, 2 * half)


@operator(
    "dequantize",
    "(Tensor data, Tensor scale, Tensor amax, int block_rows, ScalarType dtype, str layout='compact', "
    "int e4m3_max=448, bool columnwise=False) -> Tensor",
)
def _(data, scale, amax, block_rows, dtype, layout="compact", e4m3_max=448, columnwise=False) -> torch.Tensor:
    return data.new_empty(values_shape(data, columnwise), dtype=dtype)


@operator(
    "dequantize_mxfp8", "(Tensor data, Tensor scale, bool columnwise, str layout, ScalarType dtype) -> Tensor"
)
def _(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    return data.new_empty(data.shape, dtype=dtype)


# Products


@operator(
    "product_values",
    "(Tensor[] data, Tensor[] scale, Tensor[] amax, int[] block_rows, int[] e4m3_max, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
)
def new_factors(data, scale, amax, block_rows, e4m3_max, dtype) -> tuple[torch.Tensor, ...]:
    outputs = [codes.new_empty(values_shape(codes, False), dtype=dtype) for codes in data]
    return (*outputs, data[0].new_empty(1, dtype=torch.float32))


@operator("product_alpha", "(Tensor[] amaxes, int[] e4m3_maxes) -> Tensor")
def _(amaxes, e4m3_maxes) -> torch.Tensor:
    return amaxes[0].new_empty(1)


_FACTORS = "Tensor a, Tensor b, Tensor? alpha, Tensor? bias"


@operator("scaled_product", f"({_FACTORS}, ScalarType out_dtype, Tensor[]? scales=None) -> Tensor")
def _(a, b, alpha, bias, out_dtype, scales=None) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@operator("add_scaled_product", f"({_FACTORS}, Tensor(a!) out, Tensor[]? scales=None) -> ()")
def _(a, b, alpha, bias, out, scales=None) -> None: ...


# Layouts


def scale_shapes(rows: int, cols: int, block_rows: int, layout: str, pad: bool) -> tuple[tuple, tuple]:
    """Of the given scales, and of those that are made."""
    source, result = ("compact", layout) if pad else (layout, "compact")
    return scale_shape(rows, cols, block_rows, source), scale_shape(rows, cols, block_rows, result)


def new_scale(scale, rows, cols, block_rows, layout, *, pad: bool, name="scale", device=None) -> torch.Tensor:
    """The scales to make from `scale`. Raises TypeError or ValueError unless it fits the matrix."""
    given, made = scale_shapes(rows, cols, block_rows, layout, pad)
    if scale.dim() == 3:
        given, made = (scale.shape[0], *given), (scale.shape[0], *made)
    raw = scale.view(torch.uint8) if scale.dtype == SCALE_DTYPE else scale
    check_buffer(name, raw, given, torch.uint8, device or scale.device)
    return scale.new_empty(made)


_SCALE = "(Tensor scale, int rows, int cols, int block_rows, str layout) -> Tensor"


@operator("pad_scale", _SCALE)
def _(*arguments) -> torch.Tensor:
    return new_scale(*arguments, pad=True)


@operator("unpad_scale", _SCALE)
def _(*arguments) -> torch.Tensor:
    return new_scale(*arguments, pad=False)


@operator("transpose_packed", "(Tensor data) -> Tensor")
def new_transpose(data) -> torch.Tensor:
    *stack, rows, half = data.shape
    check_matrix(rows, 2 * half, columnwise=True)
    return data.new_empty((*stack, 2 * half, rows // 2))
