"""zerofp4::quantize, a matrix into given buffers, and zerofp4::quantize_dequantize, its values in one go.

Both take a stack of matrices [E, N, K] in blocks of 16x16, too, each with an amax and a state of random
numbers of its own: in one launch, but one after the other with stochastic rounding or four over six.
"""

import torch

import zerofp4._C as _C
from zerofp4.format import BLOCK, SCALE_LAYOUTS, WEIGHT_DTYPES, FourOverSix
from zerofp4.layout import check_matrix, columnwise_rows, packed_shape, scale_shape
from zerofp4.ops.device import DTYPE_CODES, data_address, scale_addresses, target_of
from zerofp4.ops.operator import (
    backend,
    check_block_rows,
    check_complete,
    check_given_amaxes,
    check_own_amaxes,
    check_scale,
    fake,
    is_plain_call,
    named_sides,
    own_amaxes,
)
from zerofp4.storage import (
    BUFFERS,
    NVFP4Storage,
    Side,
    Sides,
    address_of,
    check_buffer,
    check_memory,
    check_rounding,
    check_transform,
    scale_name,
)

_OPTIONS = "Tensor? rng_state, int e4m3_max, str error"
_SCALES = "Tensor({})? {side}_scale, Tensor({})? {side}_scale_expanded, Tensor({})? {side}_scale_swizzled"
torch.library.define(
    "zerofp4::quantize",
    "(Tensor x, int block_rows, Tensor? given_amax, Tensor? given_columnwise_amax, bool hadamard, "
    + f"bool random_signs, {_OPTIONS}, Tensor? skip, Tensor(a!)? rowwise_data, "
    + _SCALES.format("b!", "c!", "d!", side="rowwise")
    + ", Tensor(e!)? columnwise_data, "
    + _SCALES.format("f!", "g!", "h!", side="columnwise")
    + ", Tensor(i!) amax, Tensor(j!)? columnwise_amax) -> ()",
)
torch.library.define(
    "zerofp4::quantize_dequantize",
    f"(Tensor x, int block_rows, Tensor? given_amax, {_OPTIONS}) -> Tensor",
)


# Checks: the public functions leave them to the operators.


def _check_input(x, block_rows, rng_state, e4m3_max, error) -> None:
    check_block_rows(block_rows)
    if (x.dim() != 2 and not _is_stack(x, block_rows)) or x.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"x must be a matrix of one of {WEIGHT_DTYPES}, got {x.dtype} {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    check_memory("x", x)
    if rng_state is not None:
        check_buffer("rng_state", rng_state, (*x.shape[:-2], 2), torch.int64, x.device)
    if not e4m3_max:
        return
    check_rounding(rng_state is not None, FourOverSix(e4m3_max, error))


def _is_stack(x, block_rows: int) -> bool:
    return x.dim() == 3 and block_rows == BLOCK


def _count(x) -> int:
    """How many matrices x is, and amaxes it has."""
    return 1 if x.dim() == 2 else x.shape[0]


def _check_sides(x, block_rows, hadamard, sides: Sides) -> None:
    *stack, rows, cols = x.shape
    check_matrix(rows, cols, columnwise=sides.columnwise is not None and not hadamard)
    stored = {"rowwise": (rows, cols), "columnwise": (cols, columnwise_rows(rows, hadamard))}
    check_complete(sides)
    for name, side in sides.sides():
        shape = (*stack, *packed_shape(*stored[name]))
        check_buffer(f"{name}_data", side.data, shape, torch.uint8, x.device)
        for layout, scale in side.scales.items():
            shape = (*stack, *scale_shape(*stored[name], block_rows, layout))
            check_scale(scale_name(name, layout), scale, shape, x.device)


def _check_quantize(
    x,
    block_rows,
    given_amax,
    given_columnwise_amax,
    hadamard,
    random_signs,
    rng_state,
    e4m3_max,
    error,
    skip,
    *buffers,
) -> Sides:
    """The buffers as sides."""
    sides = named_sides(BUFFERS, buffers)
    _check_input(x, block_rows, rng_state, e4m3_max, error)
    check_transform(block_rows, sides.columnwise is not None, hadamard, random_signs)
    _check_sides(x, block_rows, hadamard, sides)
    if skip is not None:
        check_buffer("skip", skip, (1,), torch.float32, x.device)
    check_given_amaxes(x.device, _count(x), given_amax, given_columnwise_amax, hadamard, sides)
    check_own_amaxes(x.device, _count(x), hadamard, sides, *buffers[-2:])
    return sides


# Backends


def _fill(amax, given, skip) -> None:
    """The amax of no elements."""
    value = torch.zeros_like(amax) if given is None else given
    amax.copy_(value if skip is None else torch.where(skip == 0, value, amax))


def _amax_pass(target, x, random_signs, skip, amax, hadamard_amax) -> None:
    """Both amaxes in one pass, or those of each matrix of a stack; one of them may be None."""
    matrix = (address_of("x", x), DTYPE_CODES[x.dtype], *x.shape[-2:])
    amaxes = address_of("amax", amax), address_of("columnwise_amax", hadamard_amax)
    _C.tensor_amax(target, *matrix, random_signs, address_of("skip", skip), *amaxes, _count(x))


_NONE = (0,) * (1 + len(SCALE_LAYOUTS))


def _addresses(data: str, scale: str, side: Side | None) -> tuple[int, ...]:
    """Of the codes and of the scales by layout, which errors call so; 0 where there is no buffer."""
    if side is None:
        return _NONE
    scales = side.scales
    if len(scales) == 1 and "compact" in scales:  # the first layout: most sides have no other
        return address_of(data, side.data), address_of(scale, scales["compact"]), 0, 0
    return (data_address(data, side), *scale_addresses(scale, side))


class Quantization:
    """The quantization of matrices [rows, cols] of a dtype with one set of options: what is left for a call
    are addresses. stacked: of stacks of such matrices.
    """

    def __init__(
        self, dtype, rows, cols, block_rows, hadamard, random_signs, e4m3_max, error, *, stacked=False
    ):
        self._hadamard, self._stacked = hadamard, stacked
        self._native = _C.Quantization(
            dtype=DTYPE_CODES[dtype],
            rows=rows,
            cols=cols,
            block_rows=block_rows,
            hadamard=hadamard,
            random_signs=random_signs,
            e4m3_max=e4m3_max,
            squared_error=error == "mse",
        )

    @classmethod
    def of(cls, record: NVFP4Storage) -> "Quantization":
        """That of matrices into buffers like the record's."""
        choice = choice_arguments(record.four_over_six)
        options = (record.block[0], record.hadamard, record.random_signs, *choice)
        return cls(record.dtype, *record.matrix, *options, stacked=record.experts is not None)

    def run(self, x, sides: Sides, amax=None, columnwise_amax=None, rng_state=None, skip=None) -> None:
        """Quantize x, which has elements; the arguments have been checked."""
        kept, columnwise_kept = own_amaxes(self._hadamard, sides)
        buffers = (
            *_addresses("rowwise_data", "rowwise_scale", sides.rowwise),
            *_addresses("columnwise_data", "columnwise_scale", sides.columnwise),
            address_of("amax", kept),
            address_of("columnwise_amax", columnwise_kept),
        )
        given = (
            address_of("amax", amax),
            address_of("columnwise_amax", columnwise_amax),
            address_of("rng_state", rng_state),
            address_of("skip", skip),
        )
        experts = x.shape[0] if self._stacked else 1
        self._native.run(target_of(x.device), address_of("x", x), buffers, *given, experts)


def _run(
    x,
    block_rows,
    given_amax,
    given_columnwise_amax,
    hadamard,
    random_signs,
    rng_state,
    e4m3_max,
    error,
    skip,
    sides: Sides,
) -> None:
    """Quantize x [M, K] or [E, N, K]; the arguments have been checked."""
    if x.numel():
        options = (block_rows, hadamard, random_signs, e4m3_max, error)
        whole = Quantization(x.dtype, *x.shape[-2:], *options, stacked=x.dim() == 3)
        whole.run(x, sides, given_amax, given_columnwise_amax, rng_state, skip)
        return
    # Where the amax of x and where that of its transform is kept; None where nothing needs it.
    for buffer, value in zip(own_amaxes(hadamard, sides), (given_amax, given_columnwise_amax), strict=True):
        if buffer is not None:
            _fill(buffer, value, skip)


@backend("quantize")
def _quantize(x, block_rows, *arguments) -> None:
    _run(x, block_rows, *arguments[:8], _check_quantize(x, block_rows, *arguments))


@fake("quantize")
def _(*args) -> None:
    _check_quantize(*args)


def _new_values(x, block_rows, given_amax, rng_state, e4m3_max, error) -> torch.Tensor:
    _check_input(x, block_rows, rng_state, e4m3_max, error)
    check_matrix(*x.shape[-2:], columnwise=False)
    if given_amax is not None:
        check_buffer("amax", given_amax, (_count(x),), torch.float32, x.device)
    return torch.empty_like(x)


@backend("quantize_dequantize")
def _quantize_dequantize(x, block_rows, given_amax, rng_state, e4m3_max, error) -> torch.Tensor:
    values = _new_values(x, block_rows, given_amax, rng_state, e4m3_max, error)
    if x.numel() == 0:
        return values
    target, amax = target_of(x.device), given_amax
    if amax is None:
        amax = torch.empty(_count(x), dtype=torch.float32, device=x.device)
        _amax_pass(target, x, True, None, amax, None)
    arguments = _C.QuantizeArgs(
        input=address_of("x", x),
        dtype=DTYPE_CODES[x.dtype],
        rows=x.shape[-2],
        cols=x.shape[-1],
        block_rows=block_rows,
        e4m3_max=e4m3_max,
        squared_error=error == "mse",
        rng_state=address_of("rng_state", rng_state),
        amax=address_of("amax", amax),
        values=values.data_ptr(),
    )
    _C.quantize(target, arguments, _count(x))
    return values


fake("quantize_dequantize")(_new_values)
torch.library.register_autograd("zerofp4::quantize_dequantize", lambda ctx, grad: (grad, *[None] * 5))


# What the layers above call


def rng_state_shape(experts: int | None) -> tuple[int, ...]:
    """A state, or one for each matrix of a stack."""
    return (2,) if experts is None else (experts, 2)


def draw_rng_state(
    device: torch.device, generator: torch.Generator | None, shape: tuple[int, ...] = (2,)
) -> torch.Tensor:
    """int64 [2] on `device`, or so many: seed and offset from torch.randint, with the generator on its own
    device.
    """
    drawn = torch.randint(
        2**63 - 1,
        shape,
        dtype=torch.int64,
        device=device if generator is None else generator.device,
        generator=generator,
    )
    return drawn.to(device)


def choice_arguments(four_over_six: FourOverSix | None) -> tuple[int, str]:
    """e4m3_max and error as the operators take them."""
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
    """Quantize x, a contiguous tensor of the record's shape, into the record's buffers, as its options say.

    amax, columnwise_amax: float32 [1], [E] of a stack, to use in place of x's own. rng_state: int64 [2],
    [E, 2] of a stack, rounding is stochastic then. skip: float32 [1], nothing is written where it is not 0.
    """
    options = (
        record.block[0],
        amax,
        columnwise_amax,
        record.hadamard,
        record.random_signs,
        rng_state,
        *choice_arguments(record.four_over_six),
        skip,
    )
    matrix = x if record.block[0] == BLOCK else x.reshape(record.matrix)
    if not is_plain_call(x):
        buffers = dict(record.buffers())
        torch.ops.zerofp4.quantize(matrix, *options, *[buffers.get(name) for name in BUFFERS])
        return
    # The record's own buffers were checked when it was made.
    _check_input(matrix, record.block[0], rng_state, *options[-3:-1])
    if skip is not None:
        check_buffer("skip", skip, (1,), torch.float32, x.device)
    check_given_amaxes(x.device, _count(matrix), amax, columnwise_amax, record.hadamard, record)
    _run(matrix, *options, record)
