"""Matrices, stacks and groups of rows into given buffers, NVFP4 and MXFP8; and their values without buffers.
A stack [E, N, K] takes one launch, or E in blocks of 1x16, with stochastic rounding, or with four over six.
"""

from collections.abc import Sequence

import torch

import zerofp4._C as _C
from zerofp4.format import FourOverSix
from zerofp4.ops.device import DTYPE_CODES, scale_addresses, target_of
from zerofp4.ops.schemas import (
    backend,
    check_amaxes,
    check_groups,
    check_skip,
    count_of,
    is_plain_call,
    new_rounded,
)
from zerofp4.storage import BUFFERS, NVFP4Storage, Side, Sides, address_of, sides_of


def own_amaxes(hadamard: bool, sides: Sides) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The buffers for the amax of the input and of its transform; None if nothing needs it."""
    if not hadamard:
        return sides.amax, None
    return sides.rowwise and sides.rowwise.amax, sides.columnwise_amax


def _addresses(data: str, scale: str, side: Side | None) -> tuple[int, ...]:
    """The addresses of codes and of scales by layout, 0 for missing ones. data, scale: names in errors."""
    if side is None:
        return 0, 0, 0, 0
    scales = side.scales
    if len(scales) == 1 and "compact" in scales:  # the first layout: most sides have no other
        return address_of(data, side.data), address_of(scale, scales["compact"]), 0, 0
    return (address_of(data, side.data), *scale_addresses(scale, side))


class Quantization:
    """Quantizes [rows, cols] matrices, or stacks of them, of one dtype with one set of options."""

    def __init__(self, dtype, matrix, block_rows, hadamard, random_signs, e4m3_max, error, stacked):
        self._hadamard, self._stacked = hadamard, stacked
        options = {"block_rows": block_rows, "hadamard": hadamard, "random_signs": random_signs}
        options |= {"e4m3_max": e4m3_max, "squared_error": error == "mse"}
        rows, cols = matrix
        self._native = _C.Quantization(dtype=DTYPE_CODES[dtype], rows=rows, cols=cols, **options)

    @classmethod
    def of(cls, record: NVFP4Storage) -> "Quantization":
        """For buffers like the record's."""
        options = (record.block[0], record.hadamard, record.random_signs)
        choice = choice_arguments(record.four_over_six)
        return cls(record.dtype, record.matrix, *options, *choice, record.experts is not None)

    def run(
        self, x, sides: Sides, amax=None, columnwise_amax=None, rng_state=None, skip=None, values=None
    ) -> None:
        """Quantize x, checked and not empty. values: gets the codes' values; no other buffer is needed."""
        places = self._places(x, sides, amax, columnwise_amax, rng_state)
        experts = x.shape[0] if self._stacked else 1
        self._native.run(*places, address_of("skip", skip), experts, address_of("values", values))

    def run_groups(self, x, splits, sides: Sides, amax, columnwise_amax, rng_state, offsets, error) -> None:
        """The same in groups of splits[g] rows; offsets and error are written."""
        places = self._places(x, sides, amax, columnwise_amax, rng_state)
        groups = address_of("m_splits", splits), splits.dtype == torch.int64, splits.shape[0]
        self._native.run_groups(*places, *groups, address_of("offsets", offsets), address_of("error", error))

    def _places(self, x, sides: Sides, amax, columnwise_amax, rng_state) -> tuple:
        kept, columnwise_kept = own_amaxes(self._hadamard, sides)
        buffers = (
            *_addresses("rowwise_data", "rowwise_scale", sides.rowwise),
            *_addresses("columnwise_data", "columnwise_scale", sides.columnwise),
            address_of("amax", kept),
            address_of("columnwise_amax", columnwise_kept),
        )
        return (
            target_of(x.device),
            address_of("x", x),
            buffers,
            address_of("amax", amax),
            address_of("columnwise_amax", columnwise_amax),
            address_of("rng_state", rng_state),
        )


def _sides_of(buffers: Sequence[torch.Tensor | None]) -> Sides:
    present = {name: buffer for name, buffer in zip(BUFFERS, buffers, strict=True) if buffer is not None}
    return Sides(**sides_of(present))


def _run(x, sides, block_rows, amax, columnwise_amax, hadamard, signs, state, e4m3_max, error, skip) -> None:
    """Quantize x [M, K] or [E, N, K] into sides of a record."""
    check_skip(skip, x.device)
    check_amaxes(x.device, count_of(x), amax, columnwise_amax, hadamard, sides.rowwise is not None)
    if x.numel():
        options = (block_rows, hadamard, signs, e4m3_max, error, x.dim() == 3)
        Quantization(x.dtype, x.shape[-2:], *options).run(x, sides, amax, columnwise_amax, state, skip)
        return
    for own, given in zip(own_amaxes(hadamard, sides), (amax, columnwise_amax), strict=True):
        if own is not None:  # of no elements
            value = torch.zeros_like(own) if given is None else given
            own.copy_(value if skip is None else torch.where(skip == 0, value, own))


@backend("quantize")
def _quantize(x, *arguments) -> None:
    _run(x, _sides_of(arguments[9:]), *arguments[:9])


@backend("quantize_dequantize")
def _quantize_dequantize(x, block_rows, given_amax, rng_state, e4m3_max, error) -> torch.Tensor:
    values = new_rounded(x, block_rows, given_amax, rng_state, e4m3_max, error)
    if x.numel() == 0:
        return values
    amax = torch.empty(count_of(x), dtype=torch.float32, device=x.device)  # is written unless it is given
    options = (block_rows, False, True, e4m3_max, error, x.dim() == 3)
    whole = Quantization(x.dtype, x.shape[-2:], *options)
    whole.run(x, Sides(rowwise=Side(None, {}, amax)), given_amax, rng_state=rng_state, values=values)
    return values


torch.library.register_autograd("zerofp4::quantize_dequantize", lambda ctx, grad: (grad, *[None] * 5))


@backend("quantize_grouped")
def _quantize_grouped(
    x, splits, given_amax, given_columnwise_amax, hadamard, random_signs, rng_state, *outputs
) -> None:
    """x [tokens, K] in groups of splits[g] rows, blocks of 1x16, into a storage of grouped_shapes, all of it.

    rng_state: int64 [groups, 2], for stochastic rounding. offsets: int64 [3, groups + 1], where groups begin
        in the rows of x, of the data and of the padded scales. error: int32 [1], 1 if a split is negative or
        their sum is not the number of rows; then the storage is all zeros.
    """
    *buffers, offsets, error = outputs
    sides, given = _sides_of(buffers), (given_amax, given_columnwise_amax)
    check_groups(x, splits, *given, hadamard, sides.rowwise is not None)
    whole = Quantization(x.dtype, x.shape, 1, hadamard, random_signs, 0, "mae", False)
    whole.run_groups(x, splits, sides, *given, rng_state, offsets, error)


@backend("quantize_mxfp8")
def _quantize_mxfp8(x, skip, *buffers) -> None:
    """x [M, K] into the given buffers, in one pass, unless skip, float32 [1], is not 0."""
    check_skip(skip, x.device)
    addresses = [address_of("out", buffer) for buffer in buffers]
    if x.numel() and any(addresses):
        options = (address_of("skip", skip), addresses[:3], addresses[3:])
        _C.quantize_mxfp8(target_of(x.device), address_of("x", x), DTYPE_CODES[x.dtype], *x.shape, *options)


# What the layers above call


def draw_rng_state(
    device: torch.device, generator: torch.Generator | None, count: int | None = None
) -> torch.Tensor:
    """int64 [2] or [count, 2] on `device`: seed and offset, by torch.randint on the generator's device."""
    shape = (2,) if count is None else (count, 2)
    drawn_on = device if generator is None else generator.device
    drawn = torch.randint(2**63 - 1, shape, dtype=torch.int64, device=drawn_on, generator=generator)
    return drawn.to(device)


def choice_arguments(four_over_six: FourOverSix | None) -> tuple[int, str]:
    return (0, "mae") if four_over_six is None else (four_over_six.e4m3_max, four_over_six.error)


def quantize_into(
    x: torch.Tensor,
    record: NVFP4Storage,
    *,
    amax: torch.Tensor | None = None,
    columnwise_amax: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """Quantize x, contiguous and of the record's shape, into the record's buffers, by the record's options.

    amax, columnwise_amax: float32 [1], [E] of a stack, instead of x's own.
    rng_state: int64 [2], [E, 2] of a stack, for stochastic rounding.
    skip: float32 [1]; if it is not 0, nothing is written.
    """
    given, transform = (amax, columnwise_amax), (record.hadamard, record.random_signs)
    choice = choice_arguments(record.four_over_six)
    options = (record.block[0], *given, *transform, rng_state, *choice, skip)
    matrix = x.reshape(record.matrix) if record.experts is None else x
    if not is_plain_call(x):
        buffers = dict(record.buffers())
        torch.ops.zerofp4.quantize(matrix, *options, *[buffers.get(name) for name in BUFFERS])
    else:
        _run(matrix, record, *options)
