"""Quantizer, quantize's options checked once, and quantize, which is a Quantizer used once."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.storage import (
    NVFP4Storage,
    Side,
    allocate,
    check_block,
    check_layouts,
    check_sides,
    check_transform,
    holds,
    rebindings,
)
from zerofp4.tensors.arguments import check_generator, check_out, check_values, detached, kernel_input
from zerofp4.tensors.initial_value import replace_initial_value
from zerofp4.tensors.nvfp4 import NVFP4Tensor
from zerofp4.tensors.quantized_tensor import wrap
from zerofp4.tensors.straight_through import StraightThrough

_REMEMBERED = 64
"""Shapes whose layouts a quantizer remembers; after so many others it begins anew."""


class _Buffer(NamedTuple):
    """What torch.empty_strided, half the price of torch.empty, takes for a buffer."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, buffer: torch.Tensor) -> "_Buffer":
        return cls(buffer.shape, buffer.stride(), buffer.dtype)

    def new(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _SideLayout(NamedTuple):
    """The buffers of a side. amax: None where it shares the other side's."""

    name: str
    data: _Buffer
    scales: list[tuple[str, _Buffer]]
    amax: _Buffer | None


class _Layout:
    """What was worked out for a shape and dtype: further calls take no checks of options and no arithmetic.

    quantization: None for no elements.
    """

    def __init__(self, record: NVFP4Storage):
        self._shape, self._context, self._sides = record.shape, record.context(), []
        for name, side in record.sides():
            shares = bool(self._sides) and side.amax is record.amax
            scales = [(layout, _Buffer.like(scale)) for layout, scale in side.scales.items()]
            amax = None if shares else _Buffer.like(side.amax)
            self._sides.append(_SideLayout(name, _Buffer.like(side.data), scales, amax))
        self._wanted = [(side.name, [layout for layout, _ in side.scales]) for side in self._sides]
        self.quantization = ops.Quantization.of(record) if record.shape.numel() else None
        # The last record that fitted, which often is the next one.
        self._last: Callable[[], NVFP4Storage | None] = lambda: None
        self._seen: tuple | None = None
        self._buffers: list[Callable[[], torch.Tensor | None]] = []

    def new_record(self, device: torch.device) -> NVFP4Storage:
        record, amax = NVFP4Storage.from_context(self._shape, self._context), None
        for name, data, scales, own_amax in self._sides:
            if own_amax is not None:
                amax = own_amax.new(device)
            buffers = {layout: scale.new(device) for layout, scale in scales}
            setattr(record, name, Side(data.new(device), buffers, amax))
        return record

    def fits(self, record: NVFP4Storage, device: torch.device) -> bool:
        """Whether the record is one of these, on the device, with the buffers asked for, all of them in
        memory that is there.
        """
        if record.shape != self._shape or record.context() != self._context:
            return False
        if self._last() is not record or self._seen != (rebindings(), device):
            for name, layouts in self._wanted:
                side = getattr(record, name)
                if side is None or not all(layout in side.scales for layout in layouts):
                    return False
            if record.device != device:
                return False
            self._last, self._seen = weakref.ref(record), (rebindings(), device)
            self._buffers = [weakref.ref(buffer) for _, buffer in record.buffers()]
        return all(buffer is not None and holds(buffer) for buffer in (known() for known in self._buffers))


class Quantizer:
    """quantize with its options checked once; the layout of a shape is worked out once and remembered.

    The options are those of quantize, which describes them: block, rowwise, columnwise, hadamard,
    random_signs, stochastic_rounding, generator, four_over_six, scale_layouts. q(x) is quantize(x, ...) and
    q.update_(out, x) is quantize(x, ..., out=out), byte for byte.

    Raises TypeError for an option of a wrong type, ValueError for a wrong option or combination of options.
    """

    def __init__(
        self,
        *,
        block: tuple[int, int] = (BLOCK, BLOCK),
        rowwise: bool = True,
        columnwise: bool = False,
        hadamard: bool = False,
        random_signs: bool = True,
        stochastic_rounding: bool = False,
        generator: torch.Generator | None = None,
        four_over_six: FourOverSix | None = None,
        scale_layouts: Sequence[str] = ("compact",),
    ):
        check_block(block)
        check_sides(rowwise, columnwise)
        check_transform(block[0], columnwise, hadamard, random_signs)
        check_generator(generator, stochastic_rounding)
        ops.check_rounding(stochastic_rounding, four_over_six)
        self._wanted: dict[str, Any] = {
            "block": tuple(block),
            "rowwise": rowwise,
            "columnwise": columnwise,
            "scale_layouts": check_layouts(scale_layouts),
        }
        self._scheme = {"hadamard": hadamard, "random_signs": random_signs, "four_over_six": four_over_six}
        self._stochastic, self._generator = stochastic_rounding, generator
        self._layouts: dict[tuple, _Layout] = {}

    def __call__(
        self,
        x: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        columnwise_amax: torch.Tensor | None = None,
    ) -> NVFP4Tensor:
        """x [..., K], of float32, bfloat16 or float16, quantized into new buffers.

        amax, columnwise_amax: as of quantize. TypeError for a wrong dtype, ValueError for a shape that the
        options do not allow.
        """
        return wrap(NVFP4Tensor, self.record(x, amax=amax, columnwise_amax=columnwise_amax))

    def record(
        self,
        x: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        columnwise_amax: torch.Tensor | None = None,
    ) -> NVFP4Storage:
        """q(x).record, for who has no use for the tensor around it."""
        layout = self._layout(x)
        if layout is None:
            record = allocate(x.shape, dtype=x.dtype, device=x.device, **self._wanted, **self._scheme)
        else:
            record = layout.new_record(x.device)
        self._fill(record, layout, x, amax, columnwise_amax, None)
        return record

    def update_(
        self,
        out: NVFP4Tensor,
        x: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        columnwise_amax: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> NVFP4Tensor:
        """x quantized into every buffer that `out` has; they stay where they are.

        out: of x's shape, dtype and device and of these options, with at least the buffers that they ask for.
        amax, columnwise_amax, skip: as of quantize. Returns out. Errors as quantize.
        """
        layout = self._layout(x)
        if layout is None or type(out) is not NVFP4Tensor or not layout.fits(out.record, x.device):
            self._check_out(out, x)
        torch.autograd.graph.increment_version(out)
        self._fill(out.record, layout, x, amax, columnwise_amax, skip)
        if skip is None:
            replace_initial_value(out.record, x)
        return out

    def _check_out(self, out: NVFP4Tensor, x: torch.Tensor) -> None:
        check_out(out, NVFP4Tensor, x, **self._wanted)
        for name, value in self._scheme.items():
            if getattr(out.record, name) != value:
                raise ValueError(f"out must have {name} {value}, got {getattr(out.record, name)}")

    def _layout(self, x: torch.Tensor) -> _Layout | None:
        """That of x's shape and dtype, remembered; None where somebody traces or transforms the call. Raises
        as q(x) does for an x that cannot be quantized.
        """
        check_values(x)
        if not ops.is_plain_call(x):
            return None
        key = (x.shape, x.dtype)
        layout = self._layouts.get(key)
        if layout is None:
            record = allocate(x.shape, dtype=x.dtype, device="meta", **self._wanted, **self._scheme)
            if len(self._layouts) == _REMEMBERED:
                self._layouts.clear()
            layout = self._layouts[key] = _Layout(record)
        return layout

    def _fill(self, record: NVFP4Storage, layout: _Layout | None, x, amax, columnwise_amax, skip) -> None:
        x = kernel_input(x)
        rng_state = self._rng_state(record) if self._stochastic else None
        if layout is not None and layout.quantization is not None:
            if amax is None and columnwise_amax is None and skip is None:
                return layout.quantization.run(x, record, rng_state=rng_state)
        ops.quantize_into(
            x,
            record,
            amax=_apart(record, detached("amax", amax)),
            columnwise_amax=_apart(record, detached("columnwise_amax", columnwise_amax)),
            rng_state=rng_state,
            skip=_apart(record, detached("skip", skip)),
        )

    def _rng_state(self, record: NVFP4Storage) -> torch.Tensor:
        return ops.draw_rng_state(record.device, self._generator, ops.rng_state_shape(record.experts))

    def __repr__(self) -> str:
        options = {**self._wanted, **self._scheme, "stochastic_rounding": self._stochastic}
        return f"Quantizer({', '.join(f'{name}={value}' for name, value in options.items())})"

    def __deepcopy__(self, memo: dict) -> "Quantizer":
        """Itself: it never changes, and a generator goes on being drawn from."""
        return self


_kept_quantizer = functools.lru_cache(maxsize=64, typed=True)(Quantizer)


def _quantizer(options: dict[str, Any]) -> Quantizer:
    """The one that was made for these options before, where they can be looked up."""
    if torch.compiler.is_compiling():  # which traces past a cache
        return Quantizer(**options)
    block, layouts = options["block"], options["scale_layouts"]
    try:
        hashable = {
            "block": tuple(block),
            "scale_layouts": layouts if type(layouts) is str else tuple(layouts),
        }
        return _kept_quantizer(**options | hashable)
    except TypeError:  # what cannot be hashed is not an option either, or is one of a kind
        return Quantizer(**options)


def _apart(record: NVFP4Storage, given: torch.Tensor | None) -> torch.Tensor | None:
    """A given value that the record's own amaxes do not overwrite before it is used."""
    if given is None or torch.compiler.is_compiling() or record.amax.device != given.device:
        return given
    own = {amax.data_ptr() for amax in (record.amax, record.columnwise_amax) if amax is not None}
    return given.clone() if given.data_ptr() in own else given


def quantize(
    x: torch.Tensor,
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    rowwise: bool = True,
    columnwise: bool = False,
    amax: torch.Tensor | None = None,
    columnwise_amax: torch.Tensor | None = None,
    hadamard: bool = False,
    random_signs: bool = True,
    stochastic_rounding: bool = False,
    generator: torch.Generator | None = None,
    four_over_six: FourOverSix | None = None,
    scale_layouts: Sequence[str] = ("compact",),
    out: NVFP4Tensor | None = None,
    skip: torch.Tensor | None = None,
    straight_through: bool = False,
) -> NVFP4Tensor:
    """Quantize x [..., K] of float32, bfloat16 or float16, K even, flattened to [M, K].

    With block (16, 16) x is [M, K], or [E, N, K]: E matrices, the weights of experts, each quantized alone,
    with E as the first dimension of every buffer and amaxes of shape [E]; one pair of launches for each.

    Two passes over x, one for its amax and one for all else; the first falls away where amaxes are given. An
    x that is not contiguous is copied first.

    block: (16, 16) for weights, where the columnwise copy is exactly the transpose; (1, 16) for activations.
    rowwise, columnwise: which copies to make; columnwise needs M even, unless hadamard completes the last
    group of rows.
    amax: float32 [1] on x's device, [E] for E matrices, the global amax to use instead of x's own; what is
    larger saturates.
    hadamard: the columnwise copy is of the random Hadamard transform of x along M, in groups of 16 rows, and
    has an amax of its own: columnwise_amax, if given. Block (1, 16) only. Both operands of a product over M
    carry the transform, so it cancels; dequantize gives the rowwise copy. random_signs=False leaves out the
    transform's signs.
    stochastic_rounding: round up with a probability that is the distance from the next lower value, in steps
    of the grid; for gradients. One call of torch.randint draws a seed from `generator` (torch's default one
    for x's device if None), on the generator's device: with one on the CPU the same seed gives the same codes
    on every device, with one on x's device the call can be captured in a CUDA graph. Under 2D scaling both
    copies hold the codes that the rowwise one drew.
    four_over_six: choose each block's scale by its error. Not with stochastic rounding.
    scale_layouts: persistent scale buffers out of "compact" (always there), "expanded", "swizzled".
    out: a tensor of x's shape, dtype and device, of this block, transform and four_over_six, to write to. It
    must have the buffers asked for; every buffer it has is written and stays where it is.
    skip: float32 [1] on x's device, with out only: where it is not 0, out keeps what it has. The kernels read
    it, so that a captured CUDA graph can refresh a weight, or not (GradScaler's found_inf is such a flag).

    straight_through: the result is differentiable: its gradient is passed on to x as it is, also where x is
    larger than a given amax (see quantize_dequantize). Not with out. Else the result has no autograd history.

    An x whose negative bit is set (x.imag of a conjugate is such a view) is quantized with its values' signs.
    TypeError for a wrong dtype or a tensor without memory of its own (a DTensor: pass its to_local()),
    ValueError for a wrong shape, option or combination of options, RuntimeError for an x whose storage was
    freed.
    """
    options = {
        "block": block,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "hadamard": hadamard,
        "random_signs": random_signs,
        "stochastic_rounding": stochastic_rounding,
        "four_over_six": four_over_six,
        "scale_layouts": scale_layouts,
    }
    quantizer = _quantizer(options) if generator is None else Quantizer(generator=generator, **options)
    if out is not None:
        if straight_through:
            raise ValueError("straight_through gives a new tensor a history, which out cannot get")
        return quantizer.update_(out, x, amax=amax, columnwise_amax=columnwise_amax, skip=skip)
    if skip is not None:
        raise ValueError("skip keeps what out has, but there is no out")
    if straight_through:
        call = functools.partial(quantizer, amax=amax, columnwise_amax=columnwise_amax)
        check_values(x)
        return StraightThrough.apply(x, call)
    return quantizer(x, amax=amax, columnwise_amax=columnwise_amax)
