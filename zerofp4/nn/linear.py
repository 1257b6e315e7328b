"""Linear: a linear layer with three quantized products; quantize_input: one input for several layers."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zerofp4.nn.operators import layer_product, outside_of_the_graph
from zerofp4.nn.quantizers import WeightCache, make_primary, quantizers_of
from zerofp4.nn.recipe import Recipe, current_recipe
from zerofp4.tensors import QuantizedTensor, StraightThrough


class Linear(nn.Linear):
    """nn.Linear that inside `autocast(recipe)` quantizes input, weight and gradient and multiplies those: y =
    x w^T + b in the forward pass, both gradients in the backward pass (see NVFP4Recipe, MXFP8Recipe).

    Outside of autocast it is nn.Linear, also with an NVFP4 weight. Each loads the other's state_dict.

    in_features, out_features, bias, device, dtype: as of nn.Linear. NVFP4 needs even sizes.
    primary_weights: make the parameter itself NVFP4, in blocks of 16x16, as convert_model does. Raises
        RuntimeError on the meta device.
    fuse_wgrad_accumulation: add the weight's gradient to weight.main_grad, which must exist, in float32 and
        unrounded (outside of autocast rounded to the weight's dtype). Autograd gets none. Sets
        weight.grad_added_to_main_grad, if that exists.
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
            make_primary(self)

    def _begin(self, fuse_wgrad_accumulation: bool = False) -> None:
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._weight_cache = WeightCache()

    @classmethod
    def _adopt(cls, module: nn.Linear) -> None:
        """Turn an nn.Linear into this class, in place: references and hooks stay valid."""
        module.__class__ = cls
        module._begin()

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._weight_cache.follow(self.weight)
        return self

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """x [..., in_features] of float32, bfloat16 or float16 to [..., out_features] of the same dtype, or
        of torch.autocast's. x may be the result of quantize_input.

        is_first_microbatch: None quantizes the weight for this call. True quantizes it into buffers that the
            layer keeps, and False reuses them in the other micro-batches of a step. A weight written to in
            between is quantized again (torch counts no writes through `.data`). Has no effect on an NVFP4
            weight and outside of autocast.

        Raises ValueError for sizes that cannot be quantized, and RuntimeError for False before any True. The
        backward pass raises RuntimeError if the weight was quantized again, or cast into, before it.
        """
        recipe = current_recipe(self)
        if recipe is None:
            refuse_shared(x)
            return F.linear(x, plain_weight(self), self.bias)
        return quantized_linear(self, x, recipe, is_first_microbatch)


def by_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of torch.autocast, if that is on."""
    if isinstance(x, QuantizedTensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x  # meta has no autocast
    return x.to(torch.get_autocast_dtype(x.device.type))


def refuse_shared(x: torch.Tensor) -> None:
    """Raises ValueError for an x that was quantized for other layers, if this one follows no recipe."""
    if isinstance(x, QuantizedTensor) and current_recipe() is not None:
        raise ValueError("x is quantized, but the layer follows no recipe: it takes what quantize_input took")


def quantized_linear(layer: Linear, x: torch.Tensor, recipe: Recipe, is_first: bool | None) -> torch.Tensor:
    weight = layer.weight
    # The shape of a quantized tensor itself goes through __torch_function__.
    shape = weight.record.shape if isinstance(weight, QuantizedTensor) else weight.shape
    if x.shape[-1:] != shape[1:]:
        raise ValueError(f"x must have {shape[1]} values in its last dimension, got shape {tuple(x.shape)}")
    if torch.compiler.is_compiling() and (isinstance(x, QuantizedTensor) or sets_flag(layer)):
        return outside_of_the_graph(quantized_linear, layer, x, recipe, is_first)
    return layer_product(
        by_autocast(x),
        weight,
        layer.bias,
        recipe,
        cache=layer._weight_cache,
        is_first=is_first,
        main_grad=main_grad_of(layer),
    )


# An input of several layers


def quantize_input(x: torch.Tensor, layer: Linear | None = None) -> torch.Tensor:
    """x [..., in_features], quantized once for several layers of zerofp4.nn, such as the projections of an
    attention. The bytes are those that each layer computes from x, and x is saved once for the backward pass.
    Its gradient is the sum of theirs.

        x = zerofp4.nn.quantize_input(self.norm(x))
        q, k, v = self.q(x), self.k(x), self.v(x)

    layer: one of the layers, if the recipe names other recipes for some modules; all must follow one.

    Returns x itself outside of autocast, for a layer that follows no recipe, and under torch.compile. Raises
    TypeError and ValueError for an x that cannot be quantized; layers of other recipes raise ValueError.
    """
    recipe = current_recipe(layer)
    if recipe is None or torch.compiler.is_compiling() or isinstance(x, QuantizedTensor):
        return x
    x = by_autocast(x)
    quantizers = quantizers_of(recipe.key, x.device)
    columnwise = torch.is_grad_enabled() and quantizers.quantized_backward

    def quantize(values: torch.Tensor) -> QuantizedTensor:
        return quantizers("input", values, rowwise=True, columnwise=columnwise)

    return StraightThrough.apply(x, quantize)


# main_grad


def main_grad_of(layer: nn.Module) -> torch.Tensor | None:
    """The float32 sum of a layer's weight gradients, or None if autograd gets them. Raises if missing."""
    weight = layer.weight
    if not (layer.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled()):
        return None
    found = getattr(weight, "main_grad", None)
    if found is None:
        raise RuntimeError(
            "fuse_wgrad_accumulation adds the weight's gradient to weight.main_grad, which is not there: "
            f"make it a float32 tensor of shape {tuple(weight.shape)}"
        )
    return found


def sets_flag(layer: nn.Module) -> bool:
    """Whether the framework has a flag for gradients that were added, which a graph cannot set."""
    return layer.fuse_wgrad_accumulation and hasattr(layer.weight, "grad_added_to_main_grad")


def gradient_after_sum(parameter: nn.Parameter) -> torch.Tensor | None:
    """Autograd's gradient after the sum: None, or zeros without memory if the flag asks for one."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return zero.expand(parameter.shape)


def plain_weight(layer: nn.Module) -> torch.Tensor:
    """A layer's weight for torch's products; its gradient goes where the layer's own products put it."""
    if not layer.fuse_wgrad_accumulation:
        return layer.weight
    return outside_of_the_graph(_AddToMainGrad.apply, layer.weight, layer)


class _AddToMainGrad(torch.autograd.Function):
    """The weight itself; its gradient is added to main_grad."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        with torch.enable_grad():
            buffer = main_grad_of(ctx.layer)
        buffer.detach().add_(grad)
        return gradient_after_sum(ctx.layer.weight), None
