"""GroupedLinear: a linear layer for each of several groups of rows."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from zerofp4.format import BLOCK
from zerofp4.nn.convert import primary_parameter, watch_assignments
from zerofp4.nn.function import LinearCall, LinearFunction, MainGrad
from zerofp4.nn.grouped_function import GroupedFunction, GroupedWeights, why_one_by_one
from zerofp4.nn.grouped_operators import compiled_groups
from zerofp4.nn.linear import Linear, linear_call, plain_weight
from zerofp4.nn.native import native_groups, native_linear
from zerofp4.nn.quantizers import WeightCache, quantizers_of
from zerofp4.nn.recipe import NVFP4Recipe, Recipe, common_recipe, current_recipe
from zerofp4.storage import rebindings
from zerofp4.tensors import NVFP4Tensor, sizes_on


class GroupedLinear(nn.Module):
    """A zerofp4.nn.Linear for each group of consecutive rows, with a weight, an amax and a cache of its own:
    the bytes of one call for each group. Groups may be empty; their parameters get gradients of zeros.

    Under an NVFP4Recipe without four over six, by the exact backend on a GPU of Hopper's or Blackwell's kind,
    in bfloat16 with features in multiples of 8, all groups are quantized in one launch and multiplied in
    one, wherever the splits are; gemm/grouped.py says how that rounds. A bias then costs two passes over the
    output, and a weight's gradient reaches main_grad rounded to bfloat16. Everywhere else one product comes
    after another, and splits on a GPU are read back, which waits for it.

    num_gemms: the number of groups. in_features and what is behind it: as of Linear, for every expert.
    stacked: False makes `experts`, a list of layers. True makes one parameter `weight` [num_gemms,
    out_features, in_features] and one `bias` [num_gemms, out_features]; a primary weight is one NVFP4Tensor
    with an amax for each expert. Both give the same bytes; a stack is quantized in one call. torch.compile
    takes all groups at once as one operator each way, with splits that may change, and a list of experts one
    after another; a stack one after another it leaves to eager execution.
    Raises ValueError for fewer than one group, and what Linear raises.
    """

    takes_nvfp4_weight = True
    """convert_model may convert the weight of a stack."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        stacked: bool = False,
        primary_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ):
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, got {num_gemms}")
        options = {"fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        if not stacked:
            self.num_gemms, self.stacked, self._operands = num_gemms, False, _Operands()
            options["primary_weights"] = primary_weights
            self.experts = nn.ModuleList(
                Linear(in_features, out_features, bias, device, dtype, **options) for _ in range(num_gemms)
            )
            return
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        # On the meta device: what Linear makes of its arguments, without memory.
        like = Linear(in_features, out_features, bias, "meta", dtype, **options)
        for name, one in (("weight", like.weight), ("bias", like.bias)):
            shape = None if one is None else (num_gemms, *one.shape)
            values = None if one is None else torch.empty(shape, dtype=one.dtype, device=device)
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        self._begin_stack(num_gemms)
        self.reset_parameters()
        if primary_weights:
            if self.weight.is_meta:
                raise RuntimeError("primary_weights=True quantizes the weight, which is on the meta device")
            self.weight = primary_parameter(self.weight, "")
            watch_assignments(self)

    def _begin_stack(self, num_gemms: int) -> None:
        """What the layer has of a stack besides its parameters."""
        self.num_gemms, self.stacked, self._operands = num_gemms, True, _Operands()
        self._weight_cache = WeightCache()
        # Of recipes whose quantization of a stack is not that of its matrices.
        self._weight_caches = [WeightCache() for _ in range(num_gemms)]
        self._matrices = _Matrices()

    def reset_parameters(self) -> None:
        """Initial values, drawn as by the layers of a list, one after the other."""
        if not self.stacked:
            for expert in self.experts:
                expert.reset_parameters()
            return
        bound = 1 / math.sqrt(self.weight.shape[2]) if self.weight.shape[2] else 0
        for e in range(self.num_gemms):
            nn.init.kaiming_uniform_(self.weight.detach()[e], a=math.sqrt(5))
            if self.bias is not None:
                nn.init.uniform_(self.bias.detach()[e], -bound, bound)

    def forward(
        self,
        x: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """x [tokens, in_features], rows in the order of their groups, to [tokens, out_features].

        m_splits: the rows of each group, num_gemms of them: integers, or a tensor of integers. What is wrong
        with those on a GPU is raised where they are read back, and elsewhere gives NaN.
        is_first_microbatch: as of Linear, for all experts. Raises ValueError for other splits, TypeError for
        what are no integers, and what Linear raises.
        """
        self._check_input(x)
        recipe = self._common_recipe()
        if recipe is not None:
            values = by_autocast(x)
            features = self.weight.shape[1:] if self.stacked else self.experts[0].weight.shape
            if why_one_by_one(values, features, recipe) is None:
                return self._at_once(values, m_splits, recipe, is_first_microbatch)
        splits = self._splits(x, m_splits)
        if self.stacked:
            return self._one_by_one(x, splits, is_first_microbatch)
        pieces = x.split(splits)
        outputs = [
            expert(piece, is_first_microbatch) for expert, piece in zip(self.experts, pieces, strict=True)
        ]
        return torch.cat(outputs)

    def _at_once(self, x, m_splits, recipe: NVFP4Recipe, is_first: bool | None) -> torch.Tensor:
        if isinstance(m_splits, torch.Tensor) and m_splits.device == x.device:
            self._check_count(m_splits.numel())
            splits = m_splits
        else:
            splits = sizes_on(self._splits(x, m_splits), x.device)
        whole = self.stacked and _is_quantized_whole(recipe)
        if self.stacked:
            self._check_features(x)
        if torch.compiler.is_compiling():
            layers = [self] if self.stacked else self.experts
            if any(layer.fuse_wgrad_accumulation for layer in layers):
                return _outside_of_the_graph(self, x, splits, is_first)
            return self._traced(x, splits, whole, recipe, is_first)
        if whole or not self.stacked:
            return self._eager(x, splits, [self] if whole else list(self.experts), recipe, is_first)
        parts = self._parts(recipe)
        needs = torch.is_grad_enabled() and x.requires_grad
        calls = [part.call(recipe, is_first, needs) for part in parts]
        return self._by_python(x, splits, parts, calls, recipe)

    def _eager(self, x, splits, layers: list, recipe: NVFP4Recipe, is_first: bool | None) -> torch.Tensor:
        """_at_once of layers, or of one that is a stack."""
        quantizers, calls, operands = quantizers_of(recipe, x.device), None, None
        weights = [layer.weight for layer in layers]
        is_primary = set(map(type, weights)) == {NVFP4Tensor}
        needs = torch.is_grad_enabled() and x.requires_grad
        is_current = main_grads = None
        if is_first is not None and (quantizers.keeps_values or not is_primary):
            calls = [linear_call(layer, layer.weight, recipe, is_first, needs) for layer in layers]
            operands = self._operands.of(calls)
            is_current = functools.partial(_are_current, calls)
        elif is_primary:
            operands = GroupedWeights([weight.record for weight in weights])
        if any(layer.fuse_wgrad_accumulation for layer in layers):
            main_grads = [MainGrad(each.weight) if each.fuse_wgrad_accumulation else None for each in layers]
        biases = _biases(layers)
        y = native_groups(x, splits, weights, biases, quantizers, operands, main_grads, is_current)
        if y is not None:
            return y
        if calls is None:
            calls = [linear_call(layer, layer.weight, recipe, is_first, needs) for layer in layers]
        return self._by_python(x, splits, layers, calls, recipe)

    def _by_python(self, x, splits, parts: Sequence, calls: list[LinearCall], recipe) -> torch.Tensor:
        parameters = [*(part.weight for part in parts), *_biases(parts)]
        return GroupedFunction.apply(x, splits, recipe, calls, self._operands.of(calls), *parameters)

    def _traced(self, x, splits, whole: bool, recipe: NVFP4Recipe, is_first: bool | None) -> torch.Tensor:
        """_at_once as one operator each way."""
        if whole or not self.stacked:
            layers = [self] if whole else list(self.experts)
            parts = [(layer.weight, layer.bias) for layer in layers]
            caches = [layer._weight_cache for layer in layers]
        else:
            biases = [None] * self.num_gemms if self.bias is None else self.bias.unbind()
            parts, caches = list(zip(self.weight.unbind(), biases, strict=True)), self._weight_caches
        return compiled_groups(x, splits, parts, caches, recipe, is_first)

    @torch.compiler.disable
    def _one_by_one(self, x: torch.Tensor, splits: list[int], is_first: bool | None) -> torch.Tensor:
        """The layers of a stack."""
        recipe = self._recipe()
        parts = self._parts(recipe)
        if recipe is None:
            pieces = zip(x.split(splits), parts, strict=True)
            return torch.cat([F.linear(piece, part.weight, part.bias) for piece, part in pieces])
        self._check_features(x)
        values = by_autocast(x)
        needs = torch.is_grad_enabled() and x.requires_grad
        outputs = []
        calls = self._calls(parts, recipe, is_first, needs)
        for piece, part, call in zip(values.split(splits), parts, calls, strict=True):
            y = native_linear(piece, part.weight, part.bias, *call)
            outputs.append(LinearFunction.apply(piece, part.weight, part.bias, call) if y is None else y)
        return torch.cat(outputs)

    def _calls(self, parts, recipe: Recipe, is_first: bool | None, needs: bool) -> list[LinearCall]:
        """Of the layers of a stack, one after another."""
        if not _is_quantized_whole(recipe):
            return [part.call(recipe, is_first, needs) for part in parts]
        whole = linear_call(self, self.weight, recipe, is_first, needs)
        records = whole.weight.matrices()
        return [
            whole._replace(weight=record, main_grad=part.main_grad)
            for record, part in zip(records, parts, strict=True)
        ]

    def _check_features(self, x: torch.Tensor) -> None:
        features = self.weight.shape[2]
        if x.shape[1] != features:
            raise ValueError(f"x must have {features} values in its last dimension, got {tuple(x.shape)}")

    def _parts(self, recipe: Recipe | None) -> list["_Part"]:
        """The layers of a stack, for one call."""
        fused = self.fuse_wgrad_accumulation and recipe is not None
        weight = plain_weight(self) if recipe is None else self.weight
        weights = _Split.apply(weight, MainGrad(self.weight) if fused else None)
        biases = [None] * self.num_gemms if self.bias is None else self.bias.unbind()
        main_grads = [MainGrad(self.weight, e) if fused else None for e in range(self.num_gemms)]
        sources = self._matrices.of(self.weight)
        fields = zip(weights, biases, sources, main_grads, self._weight_caches, strict=True)
        return [_Part(*each) for each in fields]

    def _recipe(self) -> Recipe | None:
        """That of a stack."""
        return current_recipe(self)

    def _common_recipe(self) -> NVFP4Recipe | None:
        """What all experts compute by, if it is the same and one of NVFP4."""
        recipe = self._recipe() if self.stacked else common_recipe(self.experts)
        return recipe if isinstance(recipe, NVFP4Recipe) else None

    def _check_input(self, x: torch.Tensor) -> None:
        if x.dim() != 2:
            raise ValueError(f"x must be [tokens, in_features], got shape {tuple(x.shape)}")

    def _check_count(self, count: int) -> None:
        if count != self.num_gemms:
            raise ValueError(f"m_splits must have {self.num_gemms} entries, got {count}")

    def _splits(self, x: torch.Tensor, m_splits: Sequence[int] | torch.Tensor) -> list[int]:
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if not all(isinstance(rows, int) for rows in splits):
            raise TypeError(f"m_splits must be integers, got {splits}")
        self._check_count(len(splits))
        if min(splits) < 0 or sum(splits) != x.shape[0]:
            raise ValueError(
                f"m_splits must not be negative and must sum to the {x.shape[0]} rows of x, got {splits}"
            )
        return splits


@torch.compiler.disable
def _outside_of_the_graph(layer: GroupedLinear, x, splits, is_first) -> torch.Tensor:
    """What torch.compile cannot trace: gradients added to main_grad."""
    return layer(x, splits, is_first)


def _are_current(calls: Sequence[LinearCall]) -> bool:
    return all(call.is_current() for call in calls)


def _biases(layers: Sequence) -> list[torch.Tensor]:
    return [layer.bias for layer in layers if layer.bias is not None]


def _is_quantized_whole(recipe: Recipe) -> bool:
    """Whether a stack is quantized in one call: in tiles, which give each matrix an amax of its own."""
    return isinstance(recipe, NVFP4Recipe) and recipe.weight_block[0] == BLOCK


def by_autocast(x: torch.Tensor) -> torch.Tensor:
    """In the dtype of torch.autocast, if that is on."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # which meta has not
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


@dataclasses.dataclass
class _Part:
    """One layer of a stack. weight: as autograd sees it. source: the same matrix, from which it is quantized
    and by which the cache knows it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    source: torch.Tensor
    main_grad: MainGrad | None
    _weight_cache: WeightCache
    fuse_wgrad_accumulation: bool = False  # main_grad says it

    def call(self, recipe: Recipe, is_first: bool | None, x_needs: bool) -> LinearCall:
        made = linear_call(self, self.source, recipe, is_first, x_needs)
        return made if self.main_grad is None else made._replace(main_grad=self.main_grad)


class _Matrices:
    """The matrices of a stacked parameter, the same objects as long as they are where they were, so that
    caches know them. Copies begin empty.
    """

    def __init__(self) -> None:
        self._place: tuple | None = None
        self._made: tuple[torch.Tensor, ...] = ()

    def of(self, stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
        place = (id(stack), rebindings() if hasattr(stack, "record") else stack.data_ptr(), stack.dtype)
        if place != self._place:
            self._made, self._place = stack.detach().unbind(), place
        return self._made

    def __deepcopy__(self, memo: dict) -> "_Matrices":
        return _Matrices()

    def __reduce__(self) -> tuple[type, tuple]:
        return _Matrices, ()


class _Operands:
    """What products take of the weights of calls: of weights that outlive a call, the same as before as long
    as those are. Copies begin empty.
    """

    def __init__(self) -> None:
        self._made: GroupedWeights | None = None

    def of(self, calls: Sequence[LinearCall]) -> GroupedWeights:
        records = [call.weight for call in calls]
        if any(call.is_current is None for call in calls):
            return GroupedWeights(records)
        if self._made is None or not self._made.are(records):
            self._made = GroupedWeights(records, lasting=True)
        return self._made

    def __deepcopy__(self, memo: dict) -> "_Operands":
        return _Operands()

    def __reduce__(self) -> tuple[type, tuple]:
        return _Operands, ()


class _Split(torch.autograd.Function):
    """(stack [E, N, K], its main_grad or None) to its matrices; their gradients, stacked, are its own, or, as
    they are in main_grad already, what that says.
    """

    @staticmethod
    def forward(ctx, stack: torch.Tensor, main_grad: MainGrad | None) -> tuple[torch.Tensor, ...]:
        ctx.main_grad = main_grad
        ctx.set_materialize_grads(main_grad is None)
        return stack.detach().unbind()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None):
        return torch.stack(grads) if ctx.main_grad is None else ctx.main_grad.gradient(), None
