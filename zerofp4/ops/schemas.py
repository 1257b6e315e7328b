"""Every operator of zerofp4: its schema, the checks of its arguments, and its results without values.

The function under @operator is the fake implementation. The backends, which the other files register, call it
too: it says what is wrong with the arguments, and allocates the results.
"""

from collections.abc import Callable, Sequence

import torch

from zerofp4.format import (
    ATOM_COLUMNS,
    ATOM_ROWS,
    BLOCK,
    MXFP8_DATA_DTYPE,
    MXFP8_SCALE_DTYPE,
    MXFP8_SCALE_LAYOUTS,
    SCALE_DTYPE,
    SCALE_LAYOUTS,
    WEIGHT_DTYPES,
    FourOverSix,
)
from zerofp4.layout import (
    ceil_div,
    check_matrix,
    columnwise_rows,
    mxfp8_scale_shape,
    packed_shape,
    round_up,
    scale_shape,
)
from zerofp4.storage import (
    BUFFERS,
    Sides,
    check_buffer,
    check_memory,
    check_rounding,
    check_transform,
    scale_name,
    sides_of,
)

E4M3_MAXIMA = (448, 256)
LARGEST_ROWS = 2**31 - 1

# Registration

_backends: dict[str, tuple[torch.library.Library, Callable]] = {}
"""By operator: what keeps its implementation registered, and the implementation."""


def operator(name: str, schema: str) -> Callable[[Callable], Callable]:
    """Defines an operator; the function is its fake()."""
    torch.library.define(f"zerofp4::{name}", schema)
    return fake(name)


def fake(name: str) -> Callable[[Callable], Callable]:
    """Registers a function as the implementation of an operator on tensors without values."""
    return torch.library.register_fake(f"zerofp4::{name}")


def backend(name: str) -> Callable[[Callable], Callable]:
    """Registers a function as the CPU and the CUDA implementation of an operator."""

    def register(function: Callable) -> Callable:
        library = torch.library.Library("zerofp4", "FRAGMENT")
        torch.library.impl(f"zerofp4::{name}", ("cpu", "cuda"), lib=library)(function)
        _backends[name] = library, function
        return function

    return register


def without_backend(name: str) -> Callable:
    """The implementation of an operator, which is not registered from now on."""
    _, call = _backends.pop(name)
    return call


def is_plain_call(x: torch.Tensor) -> bool:
    """True if x is a plain tensor and neither tracing nor a dispatch mode is active. Callers then skip the
    dispatcher and call the backend directly, which saves most of the host's time.
    """
    return (
        (type(x) is torch.Tensor or type(x) is torch.nn.Parameter)
        and (x.is_cpu or x.is_cuda)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
    )


# Checks that several operators share


def check_block_rows(block_rows: int) -> None:
    if block_rows not in (1, BLOCK):
        raise ValueError(f"block_rows must be 1 or {BLOCK}, got {block_rows}")


def check_bytes(
    name: str, buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Floats of one byte may also come as their uint8 bytes: much of torch, opcheck included, lacks them."""
    raw = buffer.view(torch.uint8) if buffer.dtype == dtype else buffer
    check_buffer(name, raw, shape, torch.uint8, device)


def check_values(x: torch.Tensor, *, stack: bool = False) -> None:
    """x is what is quantized: a matrix, or with `stack` several."""
    if x.dim() not in ((2, 3) if stack else (2,)) or x.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"x must be a matrix of one of {WEIGHT_DTYPES}, got {x.dtype} {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    check_memory("x", x)


def check_skip(skip: torch.Tensor | None, device: torch.device) -> None:
    if skip is not None:
        check_buffer("skip", skip, (1,), torch.float32, device)


def check_given_amaxes(device, count: int, amax, columnwise_amax, hadamard: bool, sides: Sides) -> None:
    """Those to use instead of the input's own, `count` of each: one, or one for every group."""
    for name, given in (("amax", amax), ("columnwise_amax", columnwise_amax)):
        if given is not None:
            check_buffer(name, given, (count,), torch.float32, device)
    if columnwise_amax is not None and not hadamard:
        raise ValueError(
            "columnwise_amax is that of the Hadamard transform, but hadamard is False: both copies have amax"
        )
    if amax is not None and hadamard and sides.rowwise is None:
        raise ValueError("amax is that of the rowwise copy, but none is asked for: give columnwise_amax")


def _check_own_amaxes(device, count: int, hadamard: bool, sides: Sides, amax, columnwise_amax) -> None:
    """Those that an operator is given to write to."""
    check_buffer("amax", amax, (count,), torch.float32, device)
    two = hadamard and sides.rowwise is not None
    if two != (columnwise_amax is not None):
        raise ValueError("a second amax belongs to a rowwise copy with a transformed columnwise one, only")
    if two:
        check_buffer("columnwise_amax", columnwise_amax, (count,), torch.float32, device)


def _named_sides(buffers: Sequence[torch.Tensor | None]) -> Sides:
    """The BUFFERS that an operator was given. Raises ValueError unless there is a side, and each has elements
    and scales.
    """
    present = {name: buffer for name, buffer in zip(BUFFERS, buffers, strict=True) if buffer is not None}
    sides = Sides(**sides_of(present))
    for name, side in sides.sides():
        if side.data is None or not side.scales:
            raise ValueError(f"{name}_data and at least one buffer of its scales must be given together")
    if sides.rowwise is None and sides.columnwise is None:
        raise ValueError("rowwise_data and columnwise_data are both None: there is nothing to write")
    return sides


# Quantize: the public functions leave the checks to the operators

_OPTIONS = "Tensor? rng_state, int e4m3_max, str error"
_BUFFERS = (
    "Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale, Tensor(c!)? rowwise_scale_expanded, "
    "Tensor(d!)? rowwise_scale_swizzled, Tensor(e!)? columnwise_data, Tensor(f!)? columnwise_scale, "
    "Tensor(g!)? columnwise_scale_expanded, Tensor(h!)? columnwise_scale_swizzled, Tensor(i!) amax, "
    "Tensor(j!)? columnwise_amax"
)


def count_of(x: torch.Tensor) -> int:
    """How many matrices x is, and amaxes it has."""
    return 1 if x.dim() == 2 else x.shape[0]


def check_input(x, block_rows, rng_state, e4m3_max, error) -> None:
    check_block_rows(block_rows)
    check_values(x, stack=block_rows == BLOCK)
    if rng_state is not None:
        check_buffer("rng_state", rng_state, (*x.shape[:-2], 2), torch.int64, x.device)
    if e4m3_max:
        check_rounding(rng_state is not None, FourOverSix(e4m3_max, error))


def sides_to_quantize(
    x, block_rows, amax, columnwise_amax, hadamard, random_signs, rng_state, e4m3_max, error, skip, *buffers
) -> Sides:
    """The buffers as sides."""
    sides = _named_sides(buffers)
    check_input(x, block_rows, rng_state, e4m3_max, error)
    check_transform(block_rows, sides.columnwise is not None, hadamard, random_signs)
    *stack, rows, cols = x.shape
    check_matrix(rows, cols, columnwise=sides.columnwise is not None and not hadamard)
    stored = {"rowwise": (rows, cols), "columnwise": (cols, columnwise_rows(rows, hadamard))}
    for name, side in sides.sides():
        shape = (*stack, *packed_shape(*stored[name]))
        check_buffer(f"{name}_data", side.data, shape, torch.uint8, x.device)
        for layout, scale in side.scales.items():
            shape = (*stack, *scale_shape(*stored[name], block_rows, layout))
            check_bytes(scale_name(name, layout), scale, shape, SCALE_DTYPE, x.device)
    check_skip(skip, x.device)
    check_given_amaxes(x.device, count_of(x), amax, columnwise_amax, hadamard, sides)
    _check_own_amaxes(x.device, count_of(x), hadamard, sides, *buffers[-2:])
    return sides


@operator(
    "quantize",
    "(Tensor x, int block_rows, Tensor? given_amax, Tensor? given_columnwise_amax, bool hadamard, "
    f"bool random_signs, {_OPTIONS}, Tensor? skip, {_BUFFERS}) -> ()",
)
def _(*arguments) -> None:
    sides_to_quantize(*arguments)


@operator("quantize_dequantize", f"(Tensor x, int block_rows, Tensor? given_amax, {_OPTIONS}) -> Tensor")
def new_rounded(x, block_rows, given_amax, rng_state, e4m3_max, error) -> torch.Tensor:
    check_input(x, block_rows, rng_state, e4m3_max, error)
    check_matrix(*x.shape[-2:], columnwise=False)
    if given_amax is not None:
        check_buffer("amax", given_amax, (count_of(x),), torch.float32, x.device)
    return torch.empty_like(x)


@operator(
    "quantize_mxfp8",
    "(Tensor x, Tensor? skip, "
    "Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale, Tensor(c!)? rowwise_scale_swizzled, "
    "Tensor(d!)? columnwise_data, Tensor(e!)? columnwise_scale, Tensor(f!)? columnwise_scale_swizzled) -> ()",
)
def check_mxfp8(x, skip, *buffers) -> None:
    check_values(x)
    check_skip(skip, x.device)
    for side, data, *scales in (("rowwise", *buffers[:3]), ("columnwise", *buffers[3:])):
        names = f"{side}_scale", f"{side}_scale_swizzled"
        if data is None:
            for name, scale in zip(names, scales, strict=True):
                if scale is not None:
                    raise ValueError(f"{name} must be given together with {side}_data")
            continue
        if scales[0] is None:
            raise ValueError(f"{side}_data and {side}_scale must be given together")
        check_bytes(f"{side}_data", data, x.shape, MXFP8_DATA_DTYPE, x.device)
        for name, scale, layout in zip(names, scales, MXFP8_SCALE_LAYOUTS, strict=True):
            if scale is not None:
                shape = mxfp8_scale_shape(*x.shape, side == "columnwise", layout)
                check_bytes(name, scale, shape, MXFP8_SCALE_DTYPE, x.device)


# Groups of rows


def grouped_rows(tokens: int, groups: int) -> tuple[int, int]:
    """Rows of data and of padded scales that suffice for the groups, however the tokens are split."""
    data_rows = round_up(tokens + (BLOCK - 1) * groups, BLOCK)
    scale_rows = round_up(tokens + (ATOM_ROWS - 1) * groups, ATOM_ROWS)
    if scale_rows > LARGEST_ROWS:
        raise ValueError(f"x must have at most {LARGEST_ROWS} rows with their padding, got {scale_rows}")
    return data_rows, scale_rows


def grouped_shapes(tokens: int, groups: int, cols: int) -> dict[str, tuple[int, ...]]:
    """The shape of every buffer of a storage for `groups` groups of together `tokens` rows."""
    data_rows, scale_rows = grouped_rows(tokens, groups)
    columns = ceil_div(cols, BLOCK)
    across = (scale_rows, round_up(columns, ATOM_COLUMNS))
    along = (round_up(cols, ATOM_ROWS) * (scale_rows // BLOCK),)
    shapes = [(data_rows, cols // 2), (data_rows, columns), across, across]
    shapes += [(cols * (data_rows // 2),), (cols * (data_rows // BLOCK),), along, along]
    return dict(zip(BUFFERS, [*shapes, (groups,), (groups,)], strict=True))


def sides_to_group(x, splits, amax, columnwise_amax, hadamard, random_signs, rng_state, *outputs) -> Sides:
    """The buffers as sides."""
    *buffers, offsets, error = outputs
    sides = _named_sides(buffers)
    check_values(x)
    check_matrix(*x.shape, columnwise=False)
    if splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"m_splits must be a vector of int32 or int64, got {splits.dtype} {tuple(splits.shape)}"
        )
    check_buffer("m_splits", splits, splits.shape, splits.dtype, x.device)
    groups = splits.shape[0]
    check_transform(1, sides.columnwise is not None, hadamard, random_signs)
    shapes = grouped_shapes(x.shape[0], groups, x.shape[1])
    for side, copy in sides.sides():
        check_buffer(f"{side}_data", copy.data, shapes[f"{side}_data"], torch.uint8, x.device)
        for layout, scale in copy.scales.items():
            name = scale_name(side, layout)
            check_bytes(name, scale, shapes[name], SCALE_DTYPE, x.device)
    check_given_amaxes(x.device, groups, amax, columnwise_amax, hadamard, sides)
    _check_own_amaxes(x.device, groups, hadamard, sides, *buffers[-2:])
    if rng_state is not None:
        check_buffer("rng_state", rng_state, (groups, 2), torch.int64, x.device)
    check_buffer("offsets", offsets, (3, groups + 1), torch.int64, x.device)
    check_buffer("error", error, (1,), torch.int32, x.device)
    return sides


@operator(
    "quantize_grouped",
    "(Tensor x, Tensor splits, Tensor? given_amax, Tensor? given_columnwise_amax, bool hadamard, "
    f"bool random_signs, Tensor? rng_state, {_BUFFERS}, Tensor(k!) offsets, Tensor(l!) error) -> ()",
)
def _(*arguments) -> None:
    sides_to_group(*arguments)


# Dequantize


def values_shape(data: torch.Tensor, columnwise: bool) -> tuple[int, ...]:
    """(M, K) or (E, M, K) of packed codes [M, K/2], columnwise [K, M/2]; of a stack with E before that."""
    *stack, rows, half = data.shape
    return (*stack, 2 * half, rows) if columnwise else (*stack, rows, 2 * half)


def _check_copy(data, scale, amax, block_rows, dtype, layout, e4m3_max, device, name: str = "") -> None:
    """name: what messages append to the names of arguments."""
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    if layout not in SCALE_LAYOUTS:
        raise ValueError(f"layout must be one of {SCALE_LAYOUTS}, got {layout!r}")
    check_block_rows(block_rows)
    if e4m3_max not in E4M3_MAXIMA:
        raise ValueError(f"e4m3_max must be one of {E4M3_MAXIMA}, got {e4m3_max}")
    if data.dim() != 2 and (data.dim() != 3 or block_rows != BLOCK):
        raise ValueError(f"data{name} must be a matrix, got shape {tuple(data.shape)}")
    *stack, rows, half = data.shape
    check_buffer(f"data{name}", data, data.shape, torch.uint8, device)
    shape = (*stack, *scale_shape(rows, 2 * half, block_rows, layout))
    check_bytes(f"scale{name}", scale, shape, SCALE_DTYPE, device)
    check_buffer(f"amax{name}", amax, tuple(stack) or (1,), torch.float32, device)


@operator(
    "dequantize",
    "(Tensor data, Tensor scale, Tensor amax, int block_rows, ScalarType dtype, str layout='compact', "
    "int e4m3_max=448, bool columnwise=False) -> Tensor",
)
def new_values(
    data, scale, amax, block_rows, dtype, layout="compact", e4m3_max=448, columnwise=False
) -> torch.Tensor:
    _check_copy(data, scale, amax, block_rows, dtype, layout, e4m3_max, data.device)
    return data.new_empty(values_shape(data, columnwise), dtype=dtype)


@operator(
    "dequantize_mxfp8",
    "(Tensor data, Tensor scale, bool columnwise, str layout, ScalarType dtype) -> Tensor",
)
def new_mxfp8_values(data, scale, columnwise, layout, dtype) -> torch.Tensor:
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    if data.dim() != 2:
        raise ValueError(f"data must be a matrix, got shape {tuple(data.shape)}")
    check_bytes("data", data, data.shape, MXFP8_DATA_DTYPE, data.device)
    shape = mxfp8_scale_shape(*data.shape, columnwise, layout)
    check_bytes("scale", scale, shape, MXFP8_SCALE_DTYPE, data.device)
    return data.new_empty(data.shape, dtype=dtype)


# Products


@operator(
    "product_values",
    "(Tensor[] data, Tensor[] scale, Tensor[] amax, int[] block_rows, int[] e4m3_max, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
)
def new_factors(data, scale, amax, block_rows, e4m3_max, dtype) -> tuple[torch.Tensor, ...]:
    lists = {"data": data, "scale": scale, "amax": amax, "block_rows": block_rows, "e4m3_max": e4m3_max}
    for name, given in lists.items():
        if len(given) != 2:
            raise ValueError(f"{name} must have the two operands of a product, got {len(given)}")
    for i, (codes, scales, own, rows, largest) in enumerate(zip(*lists.values(), strict=True)):
        _check_copy(codes, scales, own, rows, dtype, "compact", largest, data[0].device, f"[{i}]")
        if codes.dim() != 2 or 0 in codes.shape:
            raise ValueError(f"data[{i}] must be a matrix with elements, got shape {tuple(codes.shape)}")
    outputs = [codes.new_empty(values_shape(codes, False), dtype=dtype) for codes in data]
    return (*outputs, data[0].new_empty(1, dtype=torch.float32))


def check_product(a, b, alpha, bias, out_dtype) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"a and b must be matrices with as many columns, got shapes {shapes}")
    if a.dtype not in WEIGHT_DTYPES or b.dtype != a.dtype or b.device != a.device:
        found = f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        raise ValueError(f"a and b must be of one dtype of {WEIGHT_DTYPES}, on one device, got {found}")
    if out_dtype not in WEIGHT_DTYPES:
        raise ValueError(f"out_dtype must be one of {WEIGHT_DTYPES}, got {out_dtype}")
    check_memory("a", a)
    check_memory("b", b)
    if alpha is not None:
        check_buffer("alpha", alpha, (1,), torch.float32, a.device)
    if bias is not None:
        if bias.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"bias must be of one of {WEIGHT_DTYPES}, got {bias.dtype}")
        if tuple(bias.shape) != (b.shape[0],) or bias.device != a.device:
            found = f"{tuple(bias.shape)} on {bias.device}"
            raise ValueError(f"bias must have shape {(b.shape[0],)} on {a.device}, got {found}")
        check_memory("bias", bias)


@operator(
    "scaled_product",
    "(Tensor a, Tensor b, Tensor? alpha, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
def _(a, b, alpha, bias, out_dtype) -> torch.Tensor:
    check_product(a, b, alpha, bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@operator("add_scaled_product", "(Tensor a, Tensor b, Tensor? alpha, Tensor? bias, Tensor(a!) out) -> ()")
def check_sum(a, b, alpha, bias, out) -> None:
    check_product(a, b, alpha, bias, torch.float32)
    check_buffer("out", out, (a.shape[0], b.shape[0]), torch.float32, a.device)


# Layouts


def scale_shapes(rows: int, cols: int, block_rows: int, layout: str, pad: bool) -> tuple[tuple, tuple]:
    """Of the scales that are given and of those that are made. Raises ValueError for an unknown option."""
    check_block_rows(block_rows)
    if layout not in SCALE_LAYOUTS[1:]:
        raise ValueError(f"layout must be one of {SCALE_LAYOUTS[1:]}, got {layout!r}")
    source, result = ("compact", layout) if pad else (layout, "compact")
    return scale_shape(rows, cols, block_rows, source), scale_shape(rows, cols, block_rows, result)


def new_scale(scale, rows, cols, block_rows, layout, *, pad: bool, name="scale", device=None) -> torch.Tensor:
    """Of a stack of matrices the scales have three dimensions."""
    given, made = scale_shapes(rows, cols, block_rows, layout, pad)
    if scale.dim() == 3:
        given, made = (scale.shape[0], *given), (scale.shape[0], *made)
    check_bytes(name, scale, given, SCALE_DTYPE, device or scale.device)
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
    if data.dim() not in (2, 3) or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError(
            f"data must be a contiguous uint8 matrix or a stack of them, got {data.dtype} {tuple(data.shape)}"
        )
    check_memory("data", data)
    *stack, rows, half = data.shape
    check_matrix(rows, 2 * half, columnwise=True)
    return data.new_empty((*stack, 2 * half, rows // 2))
