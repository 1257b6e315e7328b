"""GroupedLinear: a linear layer for each of several groups of rows."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zerofp4.gemm import chosen_backend, why_not_grouped
from zerofp4.nn.linear import Linear, by_autocast, gradient_after_sum, main_grad_of, plain_weight, sets_flag
from zerofp4.nn.operators import layer_product, outside_of_the_graph
from zerofp4.nn.quantizers import (
    WeightCache,
    check_primary,
    make_primary,
    quantizers_of,
    shown,
    weight_state,
)
from zerofp4.nn.recipe import NVFP4Recipe, Recipe, current_recipe, recipe_of_key
from zerofp4.storage import NVFP4Storage, Storage
from zerofp4.tensors import NVFP4Tensor, QuantizedTensor, host_sizes, sizes_on


class GroupedLinear(nn.Module):
    """A zerofp4.nn.Linear for each group of consecutive rows, each with its own weight and amax. The bytes
    are those of one call per group. Groups may be empty; their parameters get gradients of zeros.

    num_gemms: the number of groups, at least 1 (ValueError). Other arguments and errors are Linear's.

    The weights are one parameter `weight` [num_gemms, out_features, in_features], the biases one `bias`
    [num_gemms, out_features]. A primary weight is one NVFP4Tensor. State dicts name each group's view,
    `weight0`, `bias0`, ...; load_state_dict also takes other forms (docs/experts.md).

    All groups take one launch to quantize and one to multiply under an NVFP4Recipe without four over six,
    with the exact backend on a Hopper or Blackwell GPU, in bfloat16, with features in multiples of 8
    (gemm/grouped.py explains the rounding). A bias then costs two passes over the output, and main_grad gets
    gradients rounded to bfloat16. Otherwise there is one product per group, and splits on a GPU are read
    back, which waits for it. torch.compile then traces the layer only if its weight is not NVFP4 and has no
    main_grad, and quantizes in each call.
    """

    takes_nvfp4_weight = True
    """convert_model may convert the weight."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        primary_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ):
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, got {num_gemms}")
        like = Linear(in_features, out_features, bias, "meta", dtype)  # checks the arguments
        for name, one in (("weight", like.weight), ("bias", like.bias)):
            shape = None if one is None else (num_gemms, *one.shape)
            values = None if one is None else torch.empty(shape, dtype=one.dtype, device=device)
            self.register_parameter(name, None if values is None else nn.Parameter(values))
        self._begin(num_gemms, fuse_wgrad_accumulation)
        self.reset_parameters()
        if primary_weights:
            make_primary(self)

    def _begin(self, num_gemms: int, fuse_wgrad_accumulation: bool = False) -> None:
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self._weight_cache = WeightCache()

    def reset_parameters(self) -> None:
        """Draws initial values as a list of Linear layers would, one after the other."""
        bound = 1 / math.sqrt(self.weight.shape[2]) if self.weight.shape[2] else 0
        for e in range(self.num_gemms):
            nn.init.kaiming_uniform_(self.weight.detach()[e], a=math.sqrt(5))
            if self.bias is not None:
                nn.init.uniform_(self.bias.detach()[e], -bound, bound)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._weight_cache.follow(self.weight)
        return self

    def extra_repr(self) -> str:
        _, out_features, in_features = self.weight.shape
        sizes = f"num_gemms={self.num_gemms}, in_features={in_features}, out_features={out_features}"
        return shown(self, f"{sizes}, bias={self.bias is not None}")

    # State dicts

    def __getattr__(self, name: str) -> Any:
        """`weight0`, ...: torch looks keys of state dicts up in modules."""
        found = re.fullmatch(r"(weight|bias)(\d+)", name)
        if found is not None and int(found[2]) < self.num_gemms:
            return super().__getattr__(found[1])[int(found[2])]
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self._parameters:  # keep_vars asks for the parameters
            whole = destination.get(prefix + name)
            if whole is not None and not hasattr(whole, "to_local"):  # a DTensor's matrices are elsewhere
                del destination[prefix + name]
                destination |= {f"{prefix}{name}{e}": one for e, one in enumerate(whole.unbind())}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in self._parameters:
            for form in (f"{name}{{}}", f"experts.{{}}.{name}"):
                keys = [prefix + form.format(e) for e in range(self.num_gemms)]
                if all(key in state_dict for key in keys):
                    state_dict[prefix + name] = _stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *others)

    # Calls

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int] | torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """x [tokens, in_features], rows in the order of their groups, to [tokens, out_features].

        m_splits: the rows of each group, integers or a tensor of integers. Invalid ones on a GPU give NaN, or
            raise where they are read back.
        is_first_microbatch: as of Linear, for all groups.

        Raises ValueError for other splits, TypeError for splits that are no integers, and what Linear raises.
        """
        if x.dim() != 2:
            raise ValueError(f"x must be [tokens, in_features], got shape {tuple(x.shape)}")
        recipe = self._recipe()
        is_simple = not isinstance(self.weight, NVFP4Tensor) and not self.fuse_wgrad_accumulation
        breaks = torch.compiler.is_compiling() and not is_simple
        if recipe is None:
            splits = self._splits(x, m_splits)
            return outside_of_the_graph(self, x, splits) if breaks else self._plain(x, splits)
        features = self.weight.shape[2]
        if x.shape[1] != features:
            raise ValueError(f"x must have {features} values in its last dimension, got {tuple(x.shape)}")
        x = by_autocast(x)
        if why_one_by_one(x, self.weight.shape[1:], recipe) is None:
            return self._at_once(x, m_splits, recipe, is_first_microbatch)
        splits = self._splits(x, m_splits)
        if breaks:
            return outside_of_the_graph(self, x, splits, is_first_microbatch)
        return self._one_by_one(x, splits, recipe, is_first_microbatch)

    def _at_once(self, x, m_splits, recipe: NVFP4Recipe, is_first: bool | None) -> torch.Tensor:
        if isinstance(m_splits, torch.Tensor) and m_splits.device == x.device:
            self._check_count(m_splits.numel())
            splits = m_splits
        else:
            splits = sizes_on(self._splits(x, m_splits), x.device)
        if torch.compiler.is_compiling() and sets_flag(self):
            return outside_of_the_graph(self, x, splits, is_first)
        options = {"cache": self._weight_cache, "is_first": is_first, "main_grad": main_grad_of(self)}
        return layer_product(x, self.weight, self.bias, recipe, splits=splits, **options)

    def _one_by_one(self, x, splits: Sequence[int], recipe: Recipe, is_first: bool | None) -> torch.Tensor:
        pieces, biases = x.split(splits), self._biases()
        if torch.compiler.is_compiling():
            parts = zip(pieces, self.weight.unbind(), biases, strict=True)
            return torch.cat([layer_product(piece, weight, bias, recipe) for piece, weight, bias in parts])
        records, is_current = self._records(recipe, is_first, torch.is_grad_enabled() and x.requires_grad)
        main_grad = main_grad_of(self)
        weights = _Split.apply(self.weight, main_grad is not None)
        outputs = []
        for e, (piece, weight, bias) in enumerate(zip(pieces, weights, biases, strict=True)):
            options = {"main_grad": None if main_grad is None else main_grad[e], "is_current": is_current}
            options["records"] = None if records is None else [records[e]]
            outputs.append(layer_product(piece, weight, bias, recipe, **options))
        return torch.cat(outputs)

    def _records(self, recipe: Recipe, is_first: bool | None, x_needs: bool):
        """Each group's quantized weight, or None if products quantize their own; whether they still hold."""
        weight, cache = self.weight, self._weight_cache
        if isinstance(weight, NVFP4Tensor):
            check_primary(weight, recipe)
            state = weight_state(weight)
            return weight.record.matrices(), lambda: weight_state(weight) == state
        quantizers = quantizers_of(recipe.key, weight.device)
        if is_first is None:
            if quantizers.scheme is None or not quantizers.has_tiles:
                return None, None
            return quantizers.weights(weight.detach(), x_needs)[0].matrices(), None
        records = cache.get(weight, quantizers, is_first)
        return records[0].matrices() if quantizers.has_tiles else records, cache.unchanged()

    def _plain(self, x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        weight = plain_weight(self)
        weights = weight.unbind() if torch.compiler.is_compiling() else _Split.apply(weight, False)
        parts = zip(x.split(splits), weights, self._biases(), strict=True)
        return torch.cat([F.linear(piece, weight, bias) for piece, weight, bias in parts])

    def _biases(self) -> Sequence[torch.Tensor | None]:
        return [None] * self.num_gemms if self.bias is None else self.bias.unbind()

    def _recipe(self) -> Recipe | None:
        return current_recipe(self)

    def _check_count(self, count: int) -> None:
        if count != self.num_gemms:
            raise ValueError(f"m_splits must have {self.num_gemms} entries, got {count}")

    def _splits(self, x: torch.Tensor, m_splits: Sequence[int] | torch.Tensor) -> tuple[int, ...]:
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits
        self._check_count(len(splits))
        return host_sizes(splits, x.shape[0])


def why_one_by_one(x: torch.Tensor, features: Sequence[int], recipe: Recipe) -> str | None:
    """Why groups need one product each, or None. x: in the product's dtype. features: of output, input."""
    if len(x) == 0:
        return "there are no tokens"
    return _why_not(x.device, x.dtype, tuple(features), recipe.key)


@torch.compiler.assume_constant_result
def _why_not(device: torch.device, dtype: torch.dtype, features: tuple[int, ...], key: str) -> str | None:
    recipe = recipe_of_key(key)
    if not isinstance(recipe, NVFP4Recipe):
        return f"{type(recipe).__name__} has no groups"
    if recipe.four_over_six is not None or recipe.backward != "quantized":
        return "groups have no four over six, and no dequantized backward pass"
    if chosen_backend(device, recipe.backend) != "exact":
        return "the native backend has no groups"
    return why_not_grouped(device, dtype, features)


def _stack(values: list[torch.Tensor]) -> torch.Tensor:
    """A stack of matrices; NVFP4 ones keep their codes."""
    if not all(isinstance(value, NVFP4Tensor) for value in values):
        return torch.stack([v.dequantize() if isinstance(v, QuantizedTensor) else v for v in values])
    records: list[Storage] = [value.record for value in values]
    found = [dict(record.buffers()) for record in records]
    buffers = {
        name: (torch.cat if "amax" in name else torch.stack)(
            [each[name].view(torch.uint8) for each in found]
        ).view(first.dtype)
        for name, first in found[0].items()
    }
    shape = torch.Size((len(records), *records[0].shape))
    stacked = records[0].block[0] == 1
    return NVFP4Tensor(NVFP4Storage.from_buffers(shape, (*records[0].context()[:-1], stacked), buffers))


class _Split(torch.autograd.Function):
    """A stack [E, N, K] to its matrices; their gradients are stacked, unless main_grad has them already."""

    @staticmethod
    def forward(ctx, stack: torch.Tensor, sums: bool) -> tuple[torch.Tensor, ...]:
        ctx.parameter = stack if sums else None
        ctx.set_materialize_grads(not sums)
        return stack.detach().unbind()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None):
        return torch.stack(grads) if ctx.parameter is None else gradient_after_sum(ctx.parameter), None
