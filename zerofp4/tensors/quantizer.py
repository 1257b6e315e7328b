"""Quantizer: quantize's options, checked once. quantize is a Quantizer used once."""

import functools
from collections.abc import Callable, Sequence

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.storage import NVFP4Storage, Scheme, Side
from zerofp4.tensors.arguments import check_generator, check_out, check_values, detached, kernel_input
from zerofp4.tensors.initial_value import replace_initial_value
from zerofp4.tensors.nvfp4 import NVFP4Tensor
from zerofp4.tensors.quantized_tensor import wrap

_REMEMBERED = 64
"""How many layouts a quantizer keeps before it forgets all."""


_Layout = tuple[NVFP4Storage, ops.Quantization | None]
"""Of a shape and dtype: a record on the meta device, and what quantizes into one; None for no elements."""


def _like(template: NVFP4Storage, device: torch.device) -> NVFP4Storage:
    def new(buffer: torch.Tensor) -> torch.Tensor:  # empty_like of a meta tensor is slow
        return torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device)

    record = NVFP4Storage.from_context(template.shape, template.context())
    amax = None
    for name, side in template.sides():
        if amax is None or side.amax is not template.amax:
            amax = new(side.amax)
        scales = {layout: new(scale) for layout, scale in side.scale_places.items()}
        setattr(record, name, Side(new(side.place), scales, amax))
    return record


class Quantizer:
    """Calls quantize with the same options many times, and checks them once.

    The options are those of quantize. The layout of each shape is computed once and kept.

    Examples:
        >>> quantizer = zerofp4.Quantizer(block=(1, 16))
        >>> t = quantizer(x)  # quantize(x, block=(1, 16))
        >>> quantizer.update_(t, x)  # quantize(x, block=(1, 16), out=t)

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
        stacked: bool = False,
    ):
        copies = {"rowwise": rowwise, "columnwise": columnwise, "scale_layouts": scale_layouts}
        transform = {"hadamard": hadamard, "random_signs": random_signs}
        rounding = {"stochastic_rounding": stochastic_rounding, "four_over_six": four_over_six}
        self._scheme = Scheme.checked(block=block, stacked=stacked, **copies, **transform, **rounding)
        check_generator(generator, stochastic_rounding)
        self._generator, self._of_records = generator, self._scheme.of_records
        self._layouts: dict[tuple, _Layout] = {}

    def __call__(
        self,
        x: torch.Tensor,
        *,
        amax: torch.Tensor | None = None,
        columnwise_amax: torch.Tensor | None = None,
    ) -> NVFP4Tensor:
        """x [..., K], of float32, bfloat16 or float16, quantized into new buffers. amax, columnwise_amax: as
        of quantize. Raises TypeError for a wrong dtype, ValueError for a shape that the options do not allow.
        """
        return wrap(NVFP4Tensor, self.record(x, amax=amax, columnwise_amax=columnwise_amax))

    def record(self, x: torch.Tensor, *, amax=None, columnwise_amax=None) -> NVFP4Storage:
        """q(x).record, without the tensor around it."""
        layout = self._layout(x)
        if layout is None:
            record = self._scheme.allocate(x.shape, x.dtype, x.device)
        else:
            record = _like(layout[0], x.device)
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
        """x quantized into every buffer of `out`, in place. Returns out.

        out: of x's shape, dtype and device and of these options, with at least the buffers that they ask for.
        amax, columnwise_amax, skip, and errors: as of quantize.
        """
        layout, scheme = self._layout(x), self._scheme
        check_out(out, NVFP4Tensor, x, scheme.sides, scheme.scale_layouts, **self._of_records)
        torch.autograd.graph.increment_version(out)
        self._fill(out.record, layout, x, amax, columnwise_amax, skip)
        if skip is None:
            replace_initial_value(out.record, x)
        return out

    def _layout(self, x: torch.Tensor) -> _Layout | None:
        """Of x; None if the call is traced or transformed. Raises as q(x) for a wrong x."""
        check_values(x)
        if not ops.is_plain_call(x):
            return None
        key = (x.shape, x.dtype)
        layout = self._layouts.get(key)
        if layout is None:
            template = self._scheme.allocate(x.shape, x.dtype, "meta")
            if len(self._layouts) == _REMEMBERED:
                self._layouts.clear()
            quantization = ops.Quantization.of(template) if x.numel() else None
            layout = self._layouts[key] = template, quantization
        return layout

    def _fill(self, record: NVFP4Storage, layout: _Layout | None, x, amax, columnwise_amax, skip) -> None:
        x = kernel_input(x)
        rng_state = None
        if self._scheme.stochastic_rounding:
            rng_state = ops.draw_rng_state(record.device, self._generator, record.experts)
        quantization = None if layout is None else layout[1]
        if quantization is not None and amax is None and columnwise_amax is None and skip is None:
            quantization.run(x, record, rng_state=rng_state)
            return
        given = {"amax": amax, "columnwise_amax": columnwise_amax, "skip": skip}
        apart = {name: _apart(record, detached(name, value)) for name, value in given.items()}
        ops.quantize_into(x, record, rng_state=rng_state, **apart)

    def __repr__(self) -> str:
        options = (f"{name}={value}" for name, value in self._scheme._asdict().items())
        return f"Quantizer({', '.join(options)})"

    def __deepcopy__(self, memo: dict) -> "Quantizer":
        """Itself: it is immutable, and shares its generator."""
        return self


_kept_quantizer = functools.lru_cache(maxsize=64, typed=True)(Quantizer)


def _apart(record: NVFP4Storage, given: torch.Tensor | None) -> torch.Tensor | None:
    """The given value, or a copy if it is the record's own amax, which would be overwritten before use."""
    if given is None or torch.compiler.is_compiling() or record.amax.device != given.device:
        return given
    own = {amax.data_ptr() for amax in (record.amax, record.columnwise_amax) if amax is not None}
    return given.clone() if given.data_ptr() in own else given


class StraightThrough(torch.autograd.Function):
    """quantize(x), with the gradient passed to x in x's dtype."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, quantize: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return quantize(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


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
    stacked: bool = False,
) -> NVFP4Tensor:
    """Quantize a tensor to NVFP4: 4-bit codes, a scale for each block, and a global amax.

    x: [..., K] of float32, bfloat16 or float16, K even, flattened to [M, K]. In blocks of (16, 16) also [E,
        N, K]: E matrices, each quantized alone, with a leading E in every buffer and amaxes [E].
    block: (16, 16) for weights, where the columnwise copy is exactly the transpose; (1, 16) for activations.
    rowwise, columnwise: which copies to make. columnwise needs M even, unless with hadamard.
    amax: float32 [1] on x's device, or [E], the global amax instead of x's own. Larger values saturate.
    hadamard: make the columnwise copy from the random Hadamard transform of x along M, in groups of 16 rows,
        with an amax of its own (columnwise_amax, if given). Block (1, 16) only. It cancels in a product over
        M if both operands have it; dequantize reads the rowwise copy. random_signs=False: no signs.
    stochastic_rounding: round up with a probability that is the distance from the lower value; for gradients.
        In blocks of (16, 16) both copies have the codes that the rowwise one drew.
    generator: for the one torch.randint that draws the seed (None: torch's default of x's device). One on the
        CPU gives the same codes on every device; a CUDA graph can capture the call with one on x's device.
    four_over_six: choose each block's scale by its error. Not with stochastic rounding.
    scale_layouts: persistent scale buffers out of "compact" (always there), "expanded", "swizzled".
    out: a tensor of x's shape, dtype and device, of this block, transform and four_over_six, with the buffers
        asked for. All its buffers are written in place.
    skip: float32 [1] on x's device, with out only: if it is not 0, out stays as it is. The kernels read it,
        so a captured CUDA graph can skip a weight (GradScaler's found_inf is such a flag).
    straight_through: pass the gradient of the result to x, also where x exceeds a given amax. Not with out.
        Otherwise the result has no autograd history.
    stacked: x is [E, N, K], E matrices, also in blocks of (1, 16). Not with hadamard.

    Examples:
        >>> weight = zerofp4.quantize(x)
        >>> activations = zerofp4.quantize(x, block=(1, 16))
        >>> values = weight.dequantize()

    It passes over x once for its amax, unless amaxes are given, and once for the rest. A non-contiguous x is
    copied first. Raises TypeError for a wrong dtype or a tensor without its own memory (for a DTensor pass
    to_local()), ValueError for a wrong shape, option or combination of options, RuntimeError for a freed x.
    """
    if not isinstance(scale_layouts, str):
        scale_layouts = tuple(scale_layouts)
    # Neither under torch.compile, which traces no cache, nor with a generator, which the cache would keep.
    is_kept = generator is None and not torch.compiler.is_compiling()
    quantizer = (_kept_quantizer if is_kept else Quantizer)(
        block=tuple(block),
        rowwise=rowwise,
        columnwise=columnwise,
        hadamard=hadamard,
        random_signs=random_signs,
        stochastic_rounding=stochastic_rounding,
        generator=generator,
        four_over_six=four_over_six,
        scale_layouts=scale_layouts,
        stacked=stacked,
    )
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
