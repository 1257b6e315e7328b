"""zerofp4::quantize_grouped: a matrix in groups of consecutive rows into one storage."""

import torch

import zerofp4._C as _C
from zerofp4.format import ATOM_COLUMNS, ATOM_ROWS, BLOCK, WEIGHT_DTYPES
from zerofp4.layout import ceil_div, check_matrix, round_up
from zerofp4.ops.device import DTYPE_CODES, data_address, scale_addresses, target_of
from zerofp4.ops.operator import (
    backend,
    check_bytes,
    check_complete,
    check_given_amaxes,
    check_own_amaxes,
    check_scale,
    fake,
    named_sides,
    own_amaxes,
)
from zerofp4.storage import (
    BUFFERS,
    Sides,
    address_of,
    check_buffer,
    check_memory,
    check_transform,
    scale_name,
)

torch.library.define(
    "zerofp4::quantize_grouped",
    "(Tensor x, Tensor splits, Tensor? given_amax, Tensor? given_columnwise_amax, bool hadamard, "
    "bool random_signs, Tensor? rng_state, Tensor(a!)? rowwise_data, Tensor(b!)? rowwise_scale, "
    "Tensor(c!)? rowwise_scale_expanded, Tensor(d!)? rowwise_scale_swizzled, Tensor(e!)? columnwise_data, "
    "Tensor(f!)? columnwise_scale, Tensor(g!)? columnwise_scale_expanded, "
    "Tensor(h!)? columnwise_scale_swizzled, Tensor(i!) amax, Tensor(j!)? columnwise_amax, "
    "Tensor(k!) offsets, Tensor(l!) error) -> ()",
)

LARGEST_ROWS = 2**31 - 1


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


# Checks: the public function leaves them to the operator.


def _check_inputs(x, splits) -> None:
    if x.dim() != 2 or x.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"x must be a matrix of one of {WEIGHT_DTYPES}, got {x.dtype} {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    check_memory("x", x)
    check_matrix(*x.shape, columnwise=False)
    if splits.dim() != 1 or splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"m_splits must be a vector of int32 or int64, got {splits.dtype} {tuple(splits.shape)}"
        )
    check_buffer("m_splits", splits, splits.shape, splits.dtype, x.device)


def _check_buffers(x, groups: int, sides: Sides) -> None:
    shapes = grouped_shapes(x.shape[0], groups, x.shape[1])
    check_complete(sides)
    for side, copy in sides.sides():
        check_bytes(f"{side}_data", copy.data, shapes[f"{side}_data"], torch.uint8, x.device)
        for layout, scale in copy.scales.items():
            name = scale_name(side, layout)
            check_scale(name, scale, shapes[name], x.device)


def _check(
    x, splits, given_amax, given_columnwise_amax, hadamard, random_signs, rng_state, *outputs
) -> Sides:
    """The buffers as sides."""
    *buffers, offsets, error = outputs
    sides = named_sides(BUFFERS, buffers)
    _check_inputs(x, splits)
    groups = splits.shape[0]
    check_transform(1, sides.columnwise is not None, hadamard, random_signs)
    _check_buffers(x, groups, sides)
    check_given_amaxes(x.device, groups, given_amax, given_columnwise_amax, hadamard, sides)
    check_own_amaxes(x.device, groups, hadamard, sides, *buffers[-2:])
    if rng_state is not None:
        check_buffer("rng_state", rng_state, (groups, 2), torch.int64, x.device)
    check_buffer("offsets", offsets, (3, groups + 1), torch.int64, x.device)
    check_buffer("error", error, (1,), torch.int32, x.device)
    return sides


@backend("quantize_grouped")
def _quantize_grouped(
    x, splits, given_amax, given_columnwise_amax, hadamard, random_signs, rng_state, *outputs
) -> None:
    """x [tokens, K] in groups of splits[g] rows, blocks of 1x16, into a storage (grouped_shapes), of which
    every byte is written.

    rng_state: int64 [groups, 2], rounding is stochastic then, each group's by its own.
    amax, columnwise_amax: float32 [groups], the ones used, the given ones or each group's own. offsets: int64
    [3, groups + 1], where groups begin in the rows of x, of the data and of the padded scales. error: int32
    [1], 1 where a split is negative or their sum is not the number of rows; then the storage is all zeros.
    """
    given = (given_amax, given_columnwise_amax)
    sides = _check(x, splits, *given, hadamard, random_signs, rng_state, *outputs)
    *_, offsets, error = outputs
    sizes = address_of("m_splits", splits), splits.dtype == torch.int64, splits.shape[0]
    rows = _C.GroupSplits(*sizes, x.shape[0])
    target = target_of(x.device)
    kept = tuple(zip(own_amaxes(hadamard, sides), given, strict=True))
    matrix = (address_of("x", x), DTYPE_CODES[x.dtype], *x.shape)
    missing = [0 if value is not None else address_of("amax", buffer) for buffer, value in kept]
    if any(missing):
        _C.grouped_amax(target, *matrix, random_signs, rows, *missing)
    used, columnwise_used = (buffer if value is None else value for buffer, value in kept)
    stored = [0 if value is None else address_of("amax", buffer) for buffer, value in kept]
    whole = _C.QuantizeArgs(
        **dict(zip(("input", "dtype", "rows", "cols"), matrix, strict=True)),
        block_rows=1,
        hadamard=hadamard,
        random_signs=random_signs,
        rng_state=address_of("rng_state", rng_state),
        amax=address_of("amax", columnwise_used if used is None else used),
        columnwise_amax=address_of("columnwise_amax", columnwise_used),
        rowwise_data=data_address("rowwise_data", sides.rowwise),
        columnwise_data=data_address("columnwise_data", sides.columnwise),
        rowwise_scale=scale_addresses("rowwise_scale", sides.rowwise),
        columnwise_scale=scale_addresses("columnwise_scale", sides.columnwise),
        stored_amax=stored[0],
        stored_columnwise_amax=stored[1],
    )
    _C.quantize_grouped(target, whole, rows, address_of("offsets", offsets), address_of("error", error))


@fake("quantize_grouped")
def _(*args) -> None:
    _check(*args)
