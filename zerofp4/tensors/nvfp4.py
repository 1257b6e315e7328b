"""NVFP4Tensor; quantize and empty make one. quantize_dequantize does without."""

import functools
from collections.abc import Sequence
from operator import attrgetter

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.layout import as_matrix
from zerofp4.storage import SIDES, NVFP4Storage, allocate, check_block, check_layouts
from zerofp4.tensors import nvfp4_values
from zerofp4.tensors.arguments import check_out, check_values, detached, kernel_input
from zerofp4.tensors.initial_value import INIT_VAL, initial_value, replace_initial_value
from zerofp4.tensors.quantized_tensor import QuantizedTensor, buffer_property, wrap
from zerofp4.tensors.straight_through import StraightThrough, with_tangent


class NVFP4Tensor(QuantizedTensor):
    """A tensor in NVFP4: 4-bit codes, E4M3 scales of blocks, a float32 amax (see QuantizedTensor). Its
    buffers are those of NVFP4Storage.
    """

    record: NVFP4Storage
    _record_type = NVFP4Storage
    _values_of = staticmethod(nvfp4_values.dequantize)
    _requantize = staticmethod(nvfp4_values.requantize)
    _copy_bytes = staticmethod(nvfp4_values.copy_bytes)

    rowwise_scale_expanded = buffer_property("rowwise_scale_expanded")
    columnwise_scale_expanded = buffer_property("columnwise_scale_expanded")
    amax = property(attrgetter("record.amax"))
    columnwise_amax = property(attrgetter("record.columnwise_amax"))
    hadamard = property(attrgetter("record.hadamard"))
    random_signs = property(attrgetter("record.random_signs"))
    four_over_six = property(attrgetter("record.four_over_six"))

    def expanded_scale(self, columnwise: bool = False) -> torch.Tensor:
        """E4M3 [round_up(M, 128), round_up(ceil(K/16), 4)], a byte per row; columnwise: of [K, M].

        The persistent buffer if there is one, else computed. Raises ValueError where the side does not exist.
        """
        return nvfp4_values.padded_scale(self.record, SIDES[int(columnwise)], "expanded")

    def swizzled_scale(self, columnwise: bool = False) -> torch.Tensor:
        """As expanded_scale, in the order in which cuBLASLt and torch.nn.functional.scaled_mm read scales."""
        return nvfp4_values.padded_scale(self.record, SIDES[int(columnwise)], "swizzled")

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """What convert_model quantized, on the CPU, or what was written to the weight since (copy_,
        load_state_dict, fill_, zero_, quantize with out), rounded to its dtype; None when there is no such
        value, it was cleared, or the codes are no longer those of it, for which it is quantized once more.

        A weight whose value was cleared takes no new one. detach, `.to(device)` and deepcopy keep it, and
        load_state_dict hands on what the other weight has;
        clone and pickling do not, and tensors on the meta device have none.
        """
        return initial_value(self.record)

    def clear_high_precision_init_val(self) -> None:
        self.record.attachments.pop(INIT_VAL, None)

    def _describe(self) -> list[str]:
        record = self.record
        fields = super()._describe()
        if record.hadamard:
            fields.append("hadamard=True" if record.random_signs else "hadamard=True, random_signs=False")
        if record.four_over_six is not None:
            fields.append(f"four_over_six={record.four_over_six}")
        has_value = type(record.amax) is torch.Tensor and not record.amax.is_meta
        return [*fields, *([f"amax={record.amax.item():.6g}"] if has_value else [])]


torch.serialization.add_safe_globals([NVFP4Tensor])


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

    Two passes over x, one for its amax and one for all else; the first falls away where amaxes are given. An
    x that is not contiguous is copied first.

    block: (16, 16) for weights, where the columnwise copy is exactly the transpose; (1, 16) for activations.
    rowwise, columnwise: which copies to make; columnwise needs M even, unless hadamard completes the last
    group of rows.
    amax: float32 [1] on x's device, the global amax to use instead of x's own; what is larger saturates.
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
    check_values(x)
    if straight_through:
        if out is not None:
            raise ValueError("straight_through gives a new tensor a history, which out cannot get")
        arguments = {name: value for name, value in locals().items() if name not in ("x", "straight_through")}
        return StraightThrough.apply(x, functools.partial(quantize, **arguments))
    options = {"hadamard": hadamard, "random_signs": random_signs, "four_over_six": four_over_six}
    wanted = {"block": tuple(block), "rowwise": rowwise, "columnwise": columnwise}
    wanted["scale_layouts"] = check_layouts(scale_layouts)
    if skip is not None and out is None:
        raise ValueError("skip keeps what out has, but there is no out")
    if out is None:
        record = allocate(x.shape, dtype=x.dtype, device=x.device, **wanted, **options)
    else:
        check_out(out, NVFP4Tensor, x, **wanted)
        for name, value in options.items():
            if getattr(out.record, name) != value:
                raise ValueError(f"out must have {name} {value}, got {getattr(out.record, name)}")
        torch.autograd.graph.increment_version(out)
        record = out.record
    ops.quantize_into(
        kernel_input(x),
        record,
        amax=_apart(record, detached("amax", amax)),
        columnwise_amax=_apart(record, detached("columnwise_amax", columnwise_amax)),
        rng_state=_rng_state(x, stochastic_rounding, generator),
        skip=_apart(record, detached("skip", skip)),
    )
    if out is not None and skip is None:
        replace_initial_value(record, x)
    return wrap(NVFP4Tensor, record) if out is None else out


def _apart(record: NVFP4Storage, given: torch.Tensor | None) -> torch.Tensor | None:
    """A given value that the record's own amaxes do not overwrite before it is used."""
    if given is None or torch.compiler.is_compiling() or record.amax.device != given.device:
        return given
    own = {amax.data_ptr() for amax in (record.amax, record.columnwise_amax) if amax is not None}
    return given.clone() if given.data_ptr() in own else given


def quantize_dequantize(
    x: torch.Tensor,
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    amax: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    generator: torch.Generator | None = None,
    four_over_six: FourOverSix | None = None,
) -> torch.Tensor:
    """Fake quantization: quantize(x, ...).dequantize() byte for byte, without the codes, in one kernel.

    The arguments are those of quantize. The result is a plain tensor of x's shape and dtype. Its gradient is
    passed straight through to x, also where x is larger than a given amax: as if quantization were the
    identity, which is what training against it needs; detach x where that is not wanted. A tangent of
    forward-mode differentiation is passed through likewise.

    TypeError for a wrong dtype, ValueError for a wrong shape, option or combination of options.
    """
    check_values(x)
    check_block(block)
    options = (
        block[0],
        detached("amax", amax),
        _rng_state(x, stochastic_rounding, generator),
        *ops.choice_arguments(four_over_six),
    )

    def run(x: torch.Tensor) -> torch.Tensor:
        matrix = x.contiguous().view(as_matrix(x.shape))
        return torch.ops.zerofp4.quantize_dequantize(matrix, *options).view(x.shape)

    return with_tangent(run, x)


def _rng_state(x: torch.Tensor, stochastic: bool, generator: torch.Generator | None) -> torch.Tensor | None:
    if generator is not None and not stochastic:
        raise ValueError("generator is for stochastic rounding, but stochastic_rounding is False")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    return ops.draw_rng_state(x.device, generator) if stochastic else None


def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    columnwise: bool = True,
    scale_layouts: Sequence[str] = ("compact",),
) -> NVFP4Tensor:
    """A weight to cast into, with 16x16 blocks; it holds zeros until then.

    Raises TypeError for a dtype that cannot be quantized, ValueError for a shape that NVFP4 cannot hold.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    options = {"columnwise": columnwise, "scale_layouts": scale_layouts}
    record = allocate(shape, dtype=dtype, device=device, **options)
    record.zero()
    return NVFP4Tensor(record)
