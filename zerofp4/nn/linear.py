"""Linear: a linear layer whose three products take quantized operands."""

import torch
from torch import nn
from torch.nn import functional as F

from zerofp4.nn.convert import LAYERS, primary_parameter, watch_assignments
from zerofp4.nn.function import AddToMainGrad, LinearCall, LinearFunction, MainGrad
from zerofp4.nn.native import native_linear
from zerofp4.nn.operators import compiled_linear
from zerofp4.nn.quantizers import WeightCache, check_primary, quantizers_of, weight_state
from zerofp4.nn.recipe import Recipe, current_recipe
from zerofp4.tensors import NVFP4Tensor, QuantizedTensor


class Linear(nn.Linear):
    """nn.Linear that inside `autocast(recipe)` quantizes input, weight and gradient, and multiplies those:
    y = x w^T + b in the forward pass, both gradients in the backward pass (see NVFP4Recipe, MXFP8Recipe).

    Outside of autocast it is nn.Linear, also where its weight is NVFP4. Parameters and state_dict are those
    of nn.Linear: each loads the other's.

    in_features, out_features, bias, device, dtype: as of nn.Linear. NVFP4 needs even sizes.
    primary_weights: the parameter itself is NVFP4, in blocks of 16x16, as convert_model makes it.
    fuse_wgrad_accumulation: add the weight's gradient, in float32 and unrounded, to weight.main_grad, which
    has to be there, and give autograd none; weight.grad_added_to_main_grad, if it exists, is set. Outside of
    autocast too, where torch rounds the gradient to the weight's dtype first.

    Raises RuntimeError for primary weights without memory.
    """

    takes_nvfp4_weight = True
    """convert_model may convert the weight, although forward is not that of nn.Linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        primary_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self._begin(fuse_wgrad_accumulation)
        if primary_weights:
            if self.weight.is_meta:
                raise RuntimeError("primary_weights=True quantizes the weight, which is on the meta device")
            self.weight = primary_parameter(self.weight, "")
            watch_assignments(self)

    def _begin(self, fuse_wgrad_accumulation: bool = False) -> None:
        """What the layer has besides an nn.Linear."""
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._weight_cache = WeightCache()

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """x [..., in_features] of float32, bfloat16 or float16 to [..., out_features] of the same dtype;
        torch.autocast, where it is on, gives both its own. x may be what quantize_input gave.

        is_first_microbatch: None quantizes the weight for this call. True quantizes it into buffers that the
        layer keeps, False takes what they hold: the same bytes, for all micro-batches of an optimizer step. A
        weight that was written to in between is quantized again, unless through `.data`, which torch does not
        count. A weight that is NVFP4 itself is taken as it is. Outside autocast it means nothing.

        Raises ValueError for sizes that cannot be quantized, RuntimeError for False before any True, and in
        the backward pass where the weight was quantized again, or cast into, since.
        """
        recipe = current_recipe(self)
        if recipe is None:
            refuse_shared(x)
            return F.linear(x, plain_weight(self), self.bias)
        return quantized_linear(self, x, recipe, is_first_microbatch)


def _become_linear(module: nn.Module) -> None:
    """Make an nn.Linear a Linear: whoever holds it or has hooks on it need not know."""
    module.__class__ = Linear
    module._begin()


LAYERS[nn.Linear] = _become_linear


def refuse_shared(x: torch.Tensor) -> None:
    """Raises ValueError, for a layer that follows no recipe inside of autocast, where x is what another layer
    takes.
    """
    if isinstance(x, QuantizedTensor) and current_recipe() is not None:
        raise ValueError("x is quantized, but the layer follows no recipe: it takes what quantize_input took")


def plain_weight(layer: nn.Module) -> torch.Tensor:
    """A layer's weight for products of torch, whose gradient goes where the layer's own products add it."""
    return _adding_to_main_grad(layer.weight) if layer.fuse_wgrad_accumulation else layer.weight


@torch.compiler.disable
def _adding_to_main_grad(weight: torch.Tensor) -> torch.Tensor:
    return AddToMainGrad.apply(weight, MainGrad(weight))


def quantized_linear(layer: Linear, x: torch.Tensor, recipe: Recipe, is_first: bool | None) -> torch.Tensor:
    """The layer's output by a recipe. Errors as Linear.forward."""
    weight = layer.weight
    # Of the record: a quantized tensor's own is found by way of __torch_function__.
    shape = weight.record.shape if isinstance(weight, QuantizedTensor) else weight.shape
    if x.shape[-1:] != shape[1:]:
        raise ValueError(f"x must have {shape[1]} values in its last dimension, got shape {tuple(x.shape)}")
    is_quantized = isinstance(x, QuantizedTensor)
    if not (is_quantized or x.is_meta) and torch.is_autocast_enabled(x.device.type):  # which meta has not
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if torch.compiler.is_compiling():
        if layer.fuse_wgrad_accumulation or is_quantized:
            return _outside_of_the_graph(layer, x, recipe, is_first)
        y = compiled_linear(layer, x.reshape(-1, x.shape[-1]), recipe, is_first)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], shape[0])
    return _eager_linear(layer, x, recipe, is_first)


def _eager_linear(layer: Linear, x: torch.Tensor, recipe: Recipe, is_first: bool | None) -> torch.Tensor:
    weight, bias, grows = layer.weight, layer.bias, torch.is_grad_enabled()
    quantizers, is_primary = quantizers_of(recipe, x.device), type(weight) is NVFP4Tensor
    call = None
    if is_first is not None and (quantizers.keeps_values or not is_primary):
        call = linear_call(layer, weight, recipe, is_first, grows and x.requires_grad)
        y = native_linear(x, weight, bias, *call)
    else:
        main_grad = MainGrad(weight) if layer.fuse_wgrad_accumulation else None
        record = weight.record if is_primary else None
        y = native_linear(x, weight, bias, quantizers, record, main_grad)
    if y is not None:
        return y
    if call is None:
        call = linear_call(layer, weight, recipe, is_first, grows and x.requires_grad)
    rows = x if x.dim() == 2 or isinstance(x, QuantizedTensor) else x.reshape(-1, x.shape[-1])
    if grows and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        y = LinearFunction.apply(rows, weight, bias, call)
    else:
        y, _ = call.forward(rows, bias, False)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


@torch.compiler.disable
def _outside_of_the_graph(layer, x, recipe, is_first) -> torch.Tensor:
    """What torch.compile cannot trace: a gradient added to main_grad, an input that is quantized already."""
    return quantized_linear(layer, x, recipe, is_first)


def linear_call(layer: Linear, weight, recipe: Recipe, is_first: bool | None, x_needs: bool) -> LinearCall:
    """Of a layer, whose weight it quantizes or takes from its cache."""
    quantizers = quantizers_of(recipe, weight.device)
    main_grad = MainGrad(weight) if layer.fuse_wgrad_accumulation else None
    if isinstance(weight, NVFP4Tensor):
        check_primary(weight, recipe)
        state, record = weight_state(weight), weight.record
        if is_first is not None and quantizers.keeps_values:
            record = layer._weight_cache.get(weight, quantizers, is_first).record
        return LinearCall(quantizers, record, main_grad, lambda: weight_state(weight) == state)
    if is_first is None:
        return LinearCall(quantizers, quantizers.weight(weight.detach(), x_needs), main_grad)
    cache = layer._weight_cache
    kept = cache.get(weight, quantizers, is_first)
    made_from = cache.state
    return LinearCall(quantizers, kept.record, main_grad, lambda: cache.state == made_from)
