"""NVFP4Tensor; empty makes one, as quantize does. quantize_dequantize does without."""

from collections.abc import Sequence
from operator import attrgetter

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, FourOverSix
from zerofp4.layout import as_matrix, stacked_matrices
from zerofp4.storage import NVFP4Storage, Scheme, side_of
from zerofp4.tensors import products
from zerofp4.tensors.arguments import check_generator, check_values, detached, weight_columns
from zerofp4.tensors.gradient_places import gradient_place
from zerofp4.tensors.initial_value import INIT_VAL, initial_value
from zerofp4.tensors.quantized_tensor import QuantizedTensor, buffer_property


class NVFP4Tensor(QuantizedTensor):
    """A tensor in NVFP4: 4-bit codes, an E4M3 scale for each block, and a float32 amax.

    quantize and empty make one. It has the logical shape and dtype, and the buffers of NVFP4Storage.
    QuantizedTensor says how operations of torch treat it.

    Examples:
        >>> t = zerofp4.quantize(torch.randn(64, 64).bfloat16())
        >>> values = t.dequantize()
        >>> codes, scales, amax = t.rowwise_data, t.rowwise_scale, t.amax

    Of [E, N, K] in blocks of 16x16, t[e] and t.unbind() are NVFP4Tensors of the experts, over the buffers of
    t: what is written through one is seen through the other.
    """

    record: NVFP4Storage
    _record_type = NVFP4Storage
    _dequantize = staticmethod(lambda record, dtype: ops.values_of(*record.values_source(), dtype))
    _quantize_into = staticmethod(ops.quantize_into)

    rowwise_scale_expanded = buffer_property("rowwise_scale_expanded")
    columnwise_scale_expanded = buffer_property("columnwise_scale_expanded")
    amax = buffer_property("amax")
    columnwise_amax = buffer_property("columnwise_amax")
    hadamard = property(attrgetter("record.hadamard"))
    random_signs = property(attrgetter("record.random_signs"))
    four_over_six = property(attrgetter("record.four_over_six"))

    def expanded_scale(self, columnwise: bool = False) -> torch.Tensor:
        """E4M3 [round_up(M, 128), round_up(ceil(K/16), 4)], a byte per row; columnwise: of [K, M].

        The persistent buffer if there is one, else computed. Raises ValueError if the side does not exist.
        """
        return ops.padded_scale(self.record, side_of(columnwise), "expanded")

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The value that convert_model quantized, or that was written to the weight since (copy_,
        load_state_dict, fill_, zero_, quantize with out), rounded to its dtype, on the CPU. None if there is
        no such value, if it was cleared, or if quantizing it again does not give the codes.

        Copying a weight's own values into it, as DDP does, changes nothing. A weight whose value was cleared
        takes no new one. detach, `.to(device)` and deepcopy keep it, and load_state_dict takes over the other
        weight's; clone and pickling do not, and tensors on the meta device have none.
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
        if record.experts is not None or not has_value:
            return fields
        return [*fields, f"amax={record.amax.item():.6g}"]


torch.serialization.add_safe_globals([NVFP4Tensor])
_linear = products.linear_product, products.linear_gradients, gradient_place
ops.configure_linear(NVFP4Tensor, NVFP4Storage.values_source, *_linear)


def quantize_dequantize(
    x: torch.Tensor,
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    amax: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    generator: torch.Generator | None = None,
    four_over_six: FourOverSix | None = None,
    stacked: bool = False,
) -> torch.Tensor:
    """Round a tensor to NVFP4 values (fake quantization): quantize(x, ...).dequantize() in one kernel.

    The arguments are those of quantize. Returns a plain tensor of x's shape and dtype, with the same bytes.

    Examples:
        >>> rounded = zerofp4.quantize_dequantize(x, block=(1, 16))

    The gradient is passed straight through to x, also where x exceeds a given amax. Detach x to avoid that.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, option or combination of options.
    """
    check_values(x)
    rounding = {"stochastic_rounding": stochastic_rounding, "four_over_six": four_over_six}
    scheme = Scheme.checked(block=block, stacked=stacked, **rounding)
    check_generator(generator, stochastic_rounding)
    experts = stacked_matrices(x.shape, block[0], stacked)
    state = ops.draw_rng_state(x.device, generator, experts) if stochastic_rounding else None
    choice = ops.choice_arguments(scheme.four_over_six)
    options = (scheme.block[0], detached("amax", amax), state, *choice)
    shape = as_matrix(x.shape) if experts is None else x.shape
    values = torch.ops.zerofp4.quantize_dequantize(x.contiguous().view(shape), *options)
    return values.view(x.shape)


def empty(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    block: tuple[int, int] = (BLOCK, BLOCK),
    columnwise: bool | None = None,
    four_over_six: FourOverSix | None = None,
    scale_layouts: Sequence[str] = ("compact",),
) -> NVFP4Tensor:
    """A weight to cast into; it holds zeros until then.

    shape: [N, K], or [E, N, K] for E experts, each a weight of its own with its own amax.
    block: (16, 16), or (1, 16), in which serving engines read weights.
    columnwise: whether it has the transposed copy, too. None: in blocks of 16x16.
    four_over_six: how casts choose its scales, of two for each block.

    Examples:
        >>> weight = zerofp4.empty((256, 512), device=x.device)

    Raises TypeError for a dtype that cannot be quantized, ValueError for a shape that NVFP4 cannot hold and
    for a columnwise copy in blocks of 1x16, which does not follow from the rows that a cast writes.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    columnwise = weight_columns(block, columnwise)
    options = {"block": block, "four_over_six": four_over_six, "scale_layouts": scale_layouts}
    scheme = Scheme.checked(columnwise=columnwise, stacked=len(shape) == 3, **options)
    record = scheme.allocate(shape, dtype, device)
    record.zero()
    return NVFP4Tensor(record)
