"""zerofp4::grouped_linear and zerofp4::grouped_linear_gradients: a layer of groups as torch.compile sees it
where all groups are multiplied at once. As operators.py, of which they are the groups' counterparts.

A primary weight comes as its buffers, in the order of BUFFERS; `primary` are those of all weights.
"""

import torch

from zerofp4 import ops
from zerofp4.nn.function import Kept
from zerofp4.nn.grouped_function import (
    GroupedWeights,
    gradients_of_groups,
    multiply_groups,
    sums_of_groups,
)
from zerofp4.nn.operators import kept_side, record_of_buffers
from zerofp4.nn.quantizers import Quantizers, WeightCache, check_primary, quantizers_of
from zerofp4.nn.recipe import Recipe, recipe_of_key
from zerofp4.storage import BUFFERS, NVFP4Storage, Side, Storage
from zerofp4.tensors import GroupedNVFP4, NVFP4Tensor, register_handler

_WEIGHTS = "Tensor[] weights, Tensor?[] primary, int[] e4m3_max, ScalarType dtype, str recipe, int[] caches"
torch.library.define(
    "zerofp4::grouped_linear",
    f"(Tensor x, Tensor splits, Tensor[] biases, {_WEIGHTS}, bool is_first, bool x_needs, bool weight_needs) "
    "-> Tensor[]",
)
torch.library.define(
    "zerofp4::grouped_linear_gradients",
    "(Tensor grad, Tensor splits, Tensor offsets, Tensor error, Tensor[] x, int cols, Tensor[] own, "
    f"{_WEIGHTS}, bool x_needs, bool bias_needs) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)

_PLACES, _COPY = 2, 3
"""What is kept: where groups begin, whether splits are wrong; of x and of weights codes, scales, amaxes."""


def compiled_groups(
    x: torch.Tensor, splits: torch.Tensor, parts, caches: list[WeightCache], recipe: Recipe, is_first
) -> torch.Tensor:
    """What GroupedLinear gives for x [T, K] at once. parts: weights, and biases or None."""
    weights = [weight for weight, _ in parts]
    biases = [bias for _, bias in parts if bias is not None]
    grows = torch.is_grad_enabled()
    cached = is_first is not None and not isinstance(weights[0], NVFP4Tensor)
    return torch.ops.zerofp4.grouped_linear(
        x,
        splits,
        biases,
        weights,
        [],
        [],
        weights[0].dtype,
        recipe.key,
        [cache.handle for cache in caches] if cached else [],
        bool(is_first),
        grows and x.requires_grad,
        grows and any(weight.requires_grad for weight in weights),
    )[0]


def _primaries(primary, e4m3_max: list[int], dtype: torch.dtype) -> list[NVFP4Storage]:
    buffers = [primary[i : i + len(BUFFERS)] for i in range(0, len(primary), len(BUFFERS))]
    return [record_of_buffers(each, dtype, most) for each, most in zip(buffers, e4m3_max, strict=True)]


def cached_records(weights, quantizers, caches: list[int], is_first: bool) -> list[Storage]:
    pairs = zip(weights, caches, strict=True)
    return [WeightCache.of_handle(cache).get(weight, quantizers, is_first).record for weight, cache in pairs]


def _copy_of(record, side_name: str) -> list[torch.Tensor]:
    side: Side = getattr(record, side_name)
    return [side.data, side.scales["compact"], side.amax]


@ops.backend("grouped_linear")
def _grouped_linear(
    x, splits, biases, weights, primary, e4m3_max, dtype, recipe, caches, is_first, x_needs, weight_needs
) -> list[torch.Tensor]:
    """[y, where groups begin, whether splits are wrong; x as it is kept for the weights' gradients, if those
    are needed; the weights as they are kept for x's, if that is needed and they were quantized for this
    call].
    """
    chosen, own = recipe_of_key(recipe), []
    quantizers = quantizers_of(chosen, x.device)
    if not weights:
        records = _primaries(primary, e4m3_max, dtype)
    elif caches:
        records = cached_records(weights, quantizers, caches, is_first)
    else:
        columnwise = x_needs and quantizers.weight_columns
        records = [quantizers.record("weight", each, rowwise=True, columnwise=columnwise) for each in weights]
        own = records if x_needs else []
    y, q_x = multiply_groups(x, splits, chosen, GroupedWeights(records), biases, weight_needs)
    places = [torch.stack([q_x.offsets, q_x.data_offsets, q_x.scale_offsets]), q_x.error]
    kept_x = _copy_of(q_x, "columnwise") if weight_needs else []
    side = kept_side(quantizers, "weight")
    return [y, *places, *kept_x, *(buffer for record in own for buffer in _copy_of(record, side))]


@ops.fake("grouped_linear")
def _(x, splits, biases, weights, primary, e4m3_max, dtype, recipe, caches, is_first, x_needs, weight_needs):
    groups, kept = splits.shape[0], []
    if weight_needs:
        shapes = ops.grouped_shapes(x.shape[0], groups, x.shape[1])
        for name in ("columnwise_data", "columnwise_scale", "columnwise_amax"):
            kept.append(x.new_empty(shapes[name], dtype=NVFP4Storage.buffer_dtype(name)))
    if weights and not caches and x_needs:
        quantizers = quantizers_of(recipe_of_key(recipe), x.device)
        copies = {"rowwise": True, "columnwise": quantizers.weight_columns}
        for weight in weights:
            kept += _copy_of(quantizers.record("weight", weight, **copies), kept_side(quantizers, "weight"))
    rows = (weights or primary)[0].shape[-2]
    places = x.new_empty((3, groups + 1), dtype=torch.int64), x.new_empty(1, dtype=torch.int32)
    return [x.new_empty(x.shape[0], rows), *places, *kept]


@ops.backend("grouped_linear_gradients")
def _gradients(
    grad,
    splits,
    offsets,
    error,
    x,
    cols,
    own,
    weights,
    primary,
    e4m3_max,
    dtype,
    recipe,
    caches,
    x_needs,
    bias_needs,
) -> list[torch.Tensor]:
    """[x's gradient, the weights' [groups, N, K], the biases'], of what is needed. x, own: what was kept."""
    chosen = recipe_of_key(recipe)
    quantizers = quantizers_of(chosen, grad.device)
    records: list = []
    if x_needs and own:
        copies = [own[i : i + _COPY] for i in range(0, len(own), _COPY)]
        records = [_restored(quantizers, dtype, copy) for copy in copies]
    elif x_needs and weights:  # torch has made sure that they are what they were in the forward pass
        records = cached_records(weights, quantizers, caches, False)
    elif x_needs:
        records = _primaries(primary, e4m3_max, dtype)
    kept_weights = GroupedWeights(records) if records else None
    kept_x = kept_groups(chosen, grad, splits, offsets, error, x, cols) if x else None
    found = [*gradients_of_groups(grad, splits, chosen, kept_weights, kept_x)]
    if bias_needs:
        found.append(sums_of_groups(grad, offsets[0]))
    return [each for each in found if each is not None]


def _restored(quantizers: Quantizers, dtype: torch.dtype, copy: list[torch.Tensor]) -> Storage:
    *stack, rows, half = copy[0].shape
    side = kept_side(quantizers, "weight")
    shape = torch.Size((*stack, *((rows, 2 * half) if side == "rowwise" else (2 * half, rows))))
    blank = quantizers.blank("weight", shape, dtype, columnwise=side == "columnwise")
    return Kept(type(blank), shape, blank.context(), side, "compact", _COPY).record(tuple(copy))


def kept_groups(recipe, grad, splits, offsets, error, x, cols: int) -> GroupedNVFP4:
    """The input as it was kept."""
    data, scale, amax = x
    options = (True, recipe.random_signs) if recipe.hadamard else (False, True)
    shape, columns = torch.Size((grad.shape[0], cols)), Side(data, {"compact": scale}, amax)
    places = (splits, error, *offsets.unbind())
    return GroupedNVFP4(shape, grad.dtype, None, *options, *places, columnwise=columns)


@ops.fake("grouped_linear_gradients")
def _(grad, splits, offsets, error, x, cols, own, *rest) -> list[torch.Tensor]:
    *_, x_needs, bias_needs = rest
    groups, features = splits.shape[0], grad.shape[1]
    shapes = [(grad.shape[0], cols)] * x_needs + [(groups, features, cols)] * bool(x)
    made = [grad.new_empty(shape) for shape in shapes]
    return made + [grad.new_empty((groups, features), dtype=torch.float32)] * bias_needs


def _setup_context(ctx, inputs, output) -> None:
    x, splits, biases, weights, _, _, ctx.dtype, ctx.recipe, ctx.caches, _, ctx.x_needs, weight_needs = inputs
    ctx.kept_x = _COPY if weight_needs else 0
    own = output[1 + _PLACES + ctx.kept_x :]
    ctx.has_own = bool(own)
    keeps_weights = ctx.x_needs and not own
    ctx.save_for_backward(splits, *output[1:], *(weights if keeps_weights else []))
    ctx.cols, ctx.count, ctx.stacked = x.shape[1], len(weights), weights[0].dim() == 3
    ctx.bias_dtypes = [bias.dtype for bias in biases]
    ctx.set_materialize_grads(False)


def _backward(ctx, grads):
    splits, offsets, error, *rest = ctx.saved_tensors
    x, rest = rest[: ctx.kept_x], rest[ctx.kept_x :]
    own, weights = (rest, []) if ctx.has_own else ([], rest)
    needs = bool(ctx.bias_dtypes)
    of_weights = (weights, [], [], ctx.dtype, ctx.recipe, ctx.caches)
    found = iter(
        torch.ops.zerofp4.grouped_linear_gradients(
            grads[0], splits, offsets, error, x, ctx.cols, own, *of_weights, ctx.x_needs, needs
        )
    )
    grad_x = next(found) if ctx.x_needs else None
    grad_weights = _each(next(found).to(ctx.dtype), ctx.stacked) if x else [None] * ctx.count
    sums = _each(next(found), ctx.stacked) if needs else []
    grad_biases = [each.to(dtype) for each, dtype in zip(sums, ctx.bias_dtypes, strict=True)]
    # torch wants a list for every list of tensors, as which it counts whatever is empty.
    of_caches = None if ctx.caches else []
    return grad_x, None, grad_biases, grad_weights, [], [], None, None, of_caches, None, None, None


def _each(stack: torch.Tensor, stacked: bool) -> list[torch.Tensor]:
    return [stack] if stacked else list(stack.unbind())


torch.library.register_autograd("zerofp4::grouped_linear", _backward, setup_context=_setup_context)


def _with_buffers(operator):
    """Its handler for weights that are NVFP4Tensors: the operator on the buffers of those."""
    names = [argument.name for argument in operator._schema.arguments]
    places = map(names.index, ("weights", "primary", "e4m3_max", "dtype", "recipe"))
    weights, primary, e4m3_max, dtype, recipe = places

    def handler(*arguments):
        arguments = list(arguments)
        given, buffers = arguments[weights], []
        for weight in given:
            check_primary(weight, recipe_of_key(arguments[recipe]))
            own = dict(weight.record.buffers())
            buffers += [own.get(name) for name in BUFFERS]
        arguments[weights], arguments[primary] = [], buffers
        arguments[e4m3_max] = [weight.record.e4m3_max for weight in given]
        arguments[dtype] = given[0].record.dtype
        return operator(*arguments)

    return handler


for _operator in (
    torch.ops.zerofp4.grouped_linear.default,
    torch.ops.zerofp4.grouped_linear_gradients.default,
):
    register_handler(_operator, _with_buffers(_operator))
