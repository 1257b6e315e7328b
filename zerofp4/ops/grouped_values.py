"""zerofp4::grouped_values: the values of groups of rows, as one product of all groups takes them."""

import torch

import zerofp4._C as _C
from zerofp4.ops.dequantize import E4M3_MAXIMA
from zerofp4.ops.device import target_of
from zerofp4.ops.grouped import grouped_rows, grouped_shapes
from zerofp4.ops.operator import backend, check_bytes, check_scale, fake, is_plain_call
from zerofp4.storage import Side, address_of, check_buffer

torch.library.define(
    "zerofp4::grouped_values",
    "(Tensor data, Tensor scale, Tensor? amax, Tensor? other_amax, int other_e4m3_max, Tensor offsets, "
    "Tensor data_offsets, Tensor error, int tokens, int cols, bool columnwise) -> (Tensor, Tensor)",
)

VECTOR = 8
"""Values that are written at once, of which a row has a multiple; and bytes, at a multiple of which codes
begin.
"""


def grouped_values(
    side: Side,
    offsets: torch.Tensor,
    data_offsets: torch.Tensor,
    error: torch.Tensor,
    shape: tuple[int, int],
    columnwise: bool,
    other_amax: torch.Tensor | None = None,
    other_e4m3_max: int = E4M3_MAXIMA[0],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, on a copy of a storage of groups [tokens, K], which has checked its buffers; with the
    amaxes of the groups where `other_amax` is given, else without global scales.
    """
    amax = None if other_amax is None else side.amax
    arguments = (side.data, side.scales["compact"], amax, other_amax, other_e4m3_max)
    places = (offsets, data_offsets, error, *shape, columnwise)
    if is_plain_call(side.data):
        return _run(*arguments, *places)
    return torch.ops.zerofp4.grouped_values(*arguments, *places)


def _shape(groups: int, tokens: int, cols: int, columnwise: bool) -> tuple[int, int]:
    """Of the values."""
    return (cols, grouped_rows(tokens, groups)[0]) if columnwise else (tokens, cols)


def _run(
    data, scale, amax, other_amax, other_e4m3_max, offsets, data_offsets, error, tokens, cols, columnwise
) -> tuple[torch.Tensor, torch.Tensor]:
    count = offsets.shape[0] - 1
    shape = _shape(count, tokens, cols, columnwise)
    out = torch.empty(shape, dtype=torch.bfloat16, device=data.device)
    ends = torch.empty(count, dtype=torch.int32, device=data.device)
    _C.grouped_values(
        target_of(data.device),
        address_of("data", data),
        address_of("scale", scale),
        (address_of("amax", amax), address_of("other_amax", other_amax)),
        other_e4m3_max,
        address_of("offsets", offsets),
        address_of("data_offsets", data_offsets),
        address_of("error", error),
        out.data_ptr(),
        ends.data_ptr(),
        tokens,
        cols,
        grouped_rows(tokens, count)[0],
        count,
        columnwise,
    )
    return out, ends


def _check(
    data, scale, amax, other_amax, other_e4m3_max, offsets, data_offsets, error, tokens, cols, columnwise
) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(f"offsets must be a vector of groups + 1, got shape {tuple(offsets.shape)}")
    if tokens < 0 or cols < 0 or cols % VECTOR:
        raise ValueError(f"cols must be a multiple of {VECTOR} and tokens not negative, got {cols}, {tokens}")
    if other_e4m3_max not in E4M3_MAXIMA:
        raise ValueError(f"other_e4m3_max must be one of {E4M3_MAXIMA}, got {other_e4m3_max}")
    if (amax is None) != (other_amax is None):
        raise ValueError("amax and other_amax must be given together, or none of them")
    count, device = offsets.shape[0] - 1, data.device
    side = "columnwise" if columnwise else "rowwise"
    shapes = grouped_shapes(tokens, count, cols)
    check_bytes("data", data, shapes[f"{side}_data"], torch.uint8, device)
    check_scale("scale", scale, shapes[f"{side}_scale"], device)
    for name, value in (("amax", amax), ("other_amax", other_amax)):
        if value is not None:
            check_buffer(name, value, (count,), torch.float32, device)
    check_buffer("offsets", offsets, (count + 1,), torch.int64, device)
    check_buffer("data_offsets", data_offsets, (count + 1,), torch.int64, device)
    check_buffer("error", error, (1,), torch.int32, device)


@backend("grouped_values")
def _grouped_values(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ends) of a copy of a storage of groups with K a multiple of 8: bfloat16 [tokens, K], the rows
    of all groups without the padding between them; or columnwise, [K, R] of R padded rows, each group's
    columns from data_offsets[g] on, zeros behind the last. ends: int32 [groups], where groups end in that.

    amax, other_amax: float32 [groups], the copy's own and those of what each group will be multiplied with,
    whose global scale is other_amax * (1 / (6 * other_e4m3_max)): values are `element * ((scale * (other *
    amax)) * (1/2688))`, rounded. Without them they are element times scale, exactly.

    Where splits were not valid (error is 1) all values are NaN, and ends such that products are.
    """
    _check(*arguments)
    data = arguments[0]
    if data.data_ptr() % VECTOR:
        raise ValueError(f"data must begin at a multiple of {VECTOR} bytes, got {data.data_ptr():#x}")
    return _run(*arguments)


@fake("grouped_values")
def _(data, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    _check(data, *rest)
    *_, offsets, _, _, tokens, cols, columnwise = rest
    values = data.new_empty(_shape(offsets.shape[0] - 1, tokens, cols, columnwise), dtype=torch.bfloat16)
    return values, data.new_empty(offsets.shape[0] - 1, dtype=torch.int32)
