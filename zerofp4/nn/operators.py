"""zerofp4::linear and zerofp4::linear_gradients: a layer as torch.compile sees it, an operator each way.

A trace sees no caches, versions and addresses, and what happens in a layer is none of its business: the
operators run what the layer runs without it, so that the bytes are the same, and stochastic rounding draws
when the backward pass runs.
"""

import torch

from zerofp4 import ops
from zerofp4.format import BLOCK, E4M3_MAX, FourOverSix
from zerofp4.nn.function import Kept, LinearCall, gradients
from zerofp4.nn.quantizers import Quantizers, WeightCache, check_primary, quantizers_of
from zerofp4.nn.recipe import Recipe, recipe_of_key
from zerofp4.storage import BUFFERS, NVFP4Storage, Storage, sides_of
from zerofp4.tensors import NVFP4Tensor, register_handler

NO_CACHE = -1

_WEIGHT = "Tensor? weight, Tensor?[] primary, ScalarType dtype, int e4m3_max, str recipe, int cache"
torch.library.define(
    "zerofp4::linear",
    f"(Tensor x, Tensor? bias, {_WEIGHT}, bool is_first, bool x_needs, bool weight_needs) -> Tensor[]",
)
torch.library.define(
    "zerofp4::linear_gradients",
    f"(Tensor grad, Tensor[] x, int cols, Tensor[] own, {_WEIGHT}, ScalarType x_dtype, bool x_needs) "
    "-> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def compiled_linear(layer, x: torch.Tensor, recipe: Recipe, is_first: bool | None) -> torch.Tensor:
    """What zerofp4.nn.Linear gives for x [T, K] inside autocast."""
    weight, bias = layer.weight, layer.bias
    grows = torch.is_grad_enabled()
    cache = NO_CACHE if is_first is None or isinstance(weight, NVFP4Tensor) else layer._weight_cache.handle
    needs = grows and x.requires_grad, grows and weight.requires_grad
    e4m3_max = int(E4M3_MAX)
    return torch.ops.zerofp4.linear(
        x, bias, weight, [], weight.dtype, e4m3_max, recipe.key, cache, bool(is_first), *needs
    )[0]


def record_of_buffers(primary: list[torch.Tensor | None], dtype: torch.dtype, e4m3_max: int) -> NVFP4Storage:
    """Of the buffers of a primary weight, in the order of BUFFERS."""
    buffers = {name: buffer for name, buffer in zip(BUFFERS, primary, strict=True) if buffer is not None}
    *lines, half = buffers["rowwise_data"].shape
    # A stack's scales are stacked, too; a matrix of one row is the same in both kinds of blocks.
    has_rows = buffers["rowwise_scale"].shape[-2] == lines[-1]
    chosen = None if e4m3_max == E4M3_MAX else FourOverSix(e4m3_max)
    block = (1 if has_rows else BLOCK, BLOCK)
    record = NVFP4Storage(torch.Size((*lines, 2 * half)), dtype, block, four_over_six=chosen)
    for name, side in sides_of(buffers).items():
        setattr(record, name, side)
    return record


def kept_side(quantizers: Quantizers, role: str) -> str:
    columns = quantizers.weight_columns if role == "weight" else quantizers.quantized_backward
    return "columnwise" if columns else "rowwise"


def _kept(quantizers: Quantizers, role: str, record: Storage) -> list[torch.Tensor]:
    """The buffers that are kept of an input or a weight that was quantized for this call."""
    return Kept.of(record, kept_side(quantizers, role), quantizers.layout)[1]


@ops.backend("linear")
def _linear(
    x, bias, weight, primary, dtype, e4m3_max, recipe, cache, is_first, x_needs, weight_needs
) -> list[torch.Tensor]:
    """[y, x as it is kept for the weight's gradient, if that is needed; the weight as it is kept for x's, if
    that is needed and the weight was quantized for this call].
    """
    quantizers = quantizers_of(recipe_of_key(recipe), x.device)
    quantized = quantizers.quantized_backward
    own = None
    if weight is None:
        operand = record_of_buffers(primary, dtype, e4m3_max)
    elif cache != NO_CACHE:
        operand = WeightCache.of_handle(cache).get(weight, quantizers, is_first).record
    else:
        operand = own = quantizers.weight(weight, x_needs)
    y, q_x = LinearCall(quantizers, operand).forward(x, bias, weight_needs and quantized)
    kept_x = _kept(quantizers, "input", q_x) if weight_needs else []
    return [y, *kept_x, *(_kept(quantizers, "weight", own) if own is not None and x_needs else [])]


@ops.fake("linear")
def _(x, bias, weight, primary, dtype, e4m3_max, recipe, cache, is_first, x_needs, weight_needs):
    quantizers = quantizers_of(recipe_of_key(recipe), x.device)
    kept = []
    if weight_needs:
        copies = {"rowwise": True, "columnwise": quantizers.quantized_backward}
        kept += _kept(quantizers, "input", quantizers.record("input", x, **copies))
    if weight is not None and cache == NO_CACHE and x_needs:
        kept += _kept(quantizers, "weight", quantizers.weight(weight, x_needs))
    rows = primary[0].shape[0] if weight is None else weight.shape[0]
    return [x.new_empty(x.shape[0], rows), *kept]


@ops.backend("linear_gradients")
def _linear_gradients(
    grad, x, cols, own, weight, primary, dtype, e4m3_max, recipe, cache, x_dtype, x_needs
) -> list[torch.Tensor]:
    """[x's gradient, the weight's], of what is needed. x, own: what _linear kept; of x that is nothing where
    the weight needs no gradient.
    """
    quantizers = quantizers_of(recipe_of_key(recipe), grad.device)
    rows = grad.shape[1]
    kept_weight = None
    if x_needs and own:
        kept_weight = _restored(quantizers, "weight", torch.Size((rows, cols)), dtype, own)
    elif x_needs and weight is not None:  # torch has made sure that it is what it was in the forward pass
        kept_weight = WeightCache.of_handle(cache).get(weight, quantizers, False).record
    elif x_needs:
        kept_weight = record_of_buffers(primary, dtype, e4m3_max)
    kept_x = _restored(quantizers, "input", torch.Size((grad.shape[0], cols)), x_dtype, x) if x else None
    found = gradients(quantizers, grad, kept_x, kept_weight, (x_dtype, dtype))
    return [each for each in found if each is not None]


def _restored(quantizers: Quantizers, role: str, shape: torch.Size, dtype: torch.dtype, buffers) -> Storage:
    side = kept_side(quantizers, role)
    blank = quantizers.blank(role, shape, dtype, columnwise=side == "columnwise")
    kept = Kept(type(blank), shape, blank.context(), side, quantizers.layout, len(buffers))
    return kept.record(tuple(buffers))


@ops.fake("linear_gradients")
def _(
    grad, x, cols, own, weight, primary, dtype, e4m3_max, recipe, cache, x_dtype, x_needs
) -> list[torch.Tensor]:
    shapes = [((grad.shape[0], cols), x_dtype)] * x_needs + [((grad.shape[1], cols), dtype)] * bool(x)
    return [grad.new_empty(shape, dtype=each) for shape, each in shapes]


def _setup_context(ctx, inputs, output) -> None:
    x, bias, weight, _, dtype, _, ctx.recipe, ctx.cache, _, ctx.x_needs, weight_needs = inputs
    quantizers = quantizers_of(recipe_of_key(ctx.recipe), x.device)
    kept = len(_names(quantizers)) if weight_needs else 0
    ctx.kept_x = kept
    own = output[1 + kept :]
    ctx.has_own = bool(own)
    keeps_weight = ctx.x_needs and not own
    ctx.save_for_backward(*output[1:], *([weight] if keeps_weight else []))
    ctx.cols, ctx.x_dtype, ctx.dtype = x.shape[1], x.dtype, dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _names(quantizers: Quantizers) -> tuple[str, ...]:
    """The buffers of a copy that is kept."""
    return ("data", "scale", "amax") if quantizers.is_nvfp4 else ("data", "scale")


def _backward(ctx, grads):
    grad = grads[0]
    saved = ctx.saved_tensors
    x, rest = list(saved[: ctx.kept_x]), list(saved[ctx.kept_x :])
    own, weight = (rest, None) if ctx.has_own else ([], rest[0] if rest else None)
    found = iter(
        torch.ops.zerofp4.linear_gradients(
            grad,
            x,
            ctx.cols,
            own,
            weight,
            [],
            ctx.dtype,
            int(E4M3_MAX),
            ctx.recipe,
            ctx.cache,
            ctx.x_dtype,
            ctx.x_needs,
        )
    )
    grad_x = next(found) if ctx.x_needs else None
    grad_weight = next(found) if x else None
    grad_bias = grad.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
    return grad_x, grad_bias, grad_weight, [], *[None] * 7


torch.library.register_autograd("zerofp4::linear", _backward, setup_context=_setup_context)


def _with_buffers(operator):
    """Its handler for a weight that is an NVFP4Tensor: the operator on the buffers of that."""
    names = [argument.name for argument in operator._schema.arguments]
    weight, primary, dtype, e4m3_max = map(names.index, ("weight", "primary", "dtype", "e4m3_max"))

    def handler(*arguments):
        arguments = list(arguments)
        record = arguments[weight].record
        check_primary(arguments[weight], recipe_of_key(arguments[names.index("recipe")]))
        buffers = dict(record.buffers())
        arguments[weight], arguments[primary] = None, [buffers.get(name) for name in BUFFERS]
        arguments[dtype], arguments[e4m3_max] = record.dtype, record.e4m3_max
        return operator(*arguments)

    return handler


for _operator in (torch.ops.zerofp4.linear.default, torch.ops.zerofp4.linear_gradients.default):
    register_handler(_operator, _with_buffers(_operator))
