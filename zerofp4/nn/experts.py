"""Experts: transformers' experts, stacked in two parameters, with quantized operands."""

import functools
import inspect

import torch
from torch import nn
from torch.nn import functional as F

from zerofp4.nn.grouped_linear import GroupedLinear, why_one_by_one
from zerofp4.nn.linear import by_autocast
from zerofp4.nn.quantizers import shown
from zerofp4.nn.recipe import Recipe, current_recipe
from zerofp4.tensors import NVFP4Tensor

PARAMETERS = ("gate_up_proj", "down_proj")
_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
"""Attributes of the kind of experts that is supported. transformers 5.17 does not have the last one yet."""
_ARGUMENTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]


class Experts(nn.Module):
    """What convert_model(layers=True) turns transformers' experts into, in place, if both are converted.

    Inside `autocast(recipe)` it makes two products of GroupedLinear, with tokens sorted by expert; outside it
    is transformers' module. Its class derives from both. torch.compile runs it eagerly.
    """

    takes_nvfp4_weight = True

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [tokens, H] to the same shape. Errors as of GroupedLinear.

        top_k_index: [tokens, k], the experts of each token. An index past the last one (an expert of another
            rank) adds nothing, whatever the token's values.
        top_k_weights: [tokens, k], the weights of their outputs.
        """
        if current_recipe(self) is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return _by_recipe(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        return shown(self, super().extra_repr())

    @classmethod
    def _adopt(cls, module: nn.Module) -> bool:
        """Turn transformers' experts, gate_up_proj [E, 2 I, H] and down_proj, into this class, in place.

        Returns False for another module, and for experts that are not both converted.
        """
        parameters = dict(module.named_parameters())
        if not (
            sorted(parameters) == sorted(PARAMETERS)
            and all(isinstance(p, NVFP4Tensor) and p.dim() == 3 for p in parameters.values())
            and all(getattr(module, name, False) is value for name, value in _LAYOUT.items())
            and list(inspect.signature(type(module).forward).parameters) == _ARGUMENTS
        ):
            return False
        module.__class__ = _class_of(type(module))
        module._products = tuple(_Product(module, name) for name in PARAMETERS)
        return True

    def __reduce__(self):
        return _new, (type(self).__mro__[2],), vars(self).copy()


@torch.compiler.disable
def _by_recipe(experts: Experts, x, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate_up, down = experts._products
    count = gate_up.num_gemms
    is_own = index < count
    expert = index.where(is_own, count).reshape(-1)
    order = expert.argsort(stable=True)
    splits = torch.zeros(count + 1, dtype=torch.int64, device=x.device)
    splits.scatter_add_(0, expert, torch.ones_like(expert))  # bincount would wait for a GPU
    splits, others = splits[:-1], splits[-1]
    if why_one_by_one(by_autocast(x[:1]), gate_up.weight.shape[1:], current_recipe(experts)) is not None:
        # The host reads the splits, which may be on a GPU.
        splits = splits.tolist()
        order = order[: sum(splits)]
    else:
        # Reading the number of tokens without an expert would wait for the GPU. They follow the last expert's
        # as zeros, which change neither amaxes nor sums.
        splits[-1] += others
    zeros = len(x)  # the row of zeros
    token = torch.where(expert[order] < count, order // index.shape[-1], zeros)
    hidden = experts._apply_gate(gate_up(F.pad(x, (0, 0, 0, 1))[token], splits))
    weights = weights.where(is_own, 0).reshape(-1)
    outputs = (down(hidden, splits) * weights[order].unsqueeze(-1)).to(x.dtype)
    return x.new_zeros(len(x) + 1, x.shape[1]).index_add_(0, token, outputs)[:zeros]


class _Product(GroupedLinear):
    """The products of one stacked parameter of another module, by that module's recipe."""

    def __init__(self, owner: Experts, name: str):
        nn.Module.__init__(self)
        self._of = (owner, name)  # in a tuple: no submodule
        self._begin(self.weight.shape[0])

    @property
    def weight(self) -> nn.Parameter:
        owner, name = self._of
        return owner._parameters[name]

    @property
    def bias(self) -> None:
        return None

    def _recipe(self) -> Recipe | None:
        return current_recipe(self._of[0])


@functools.cache
def _class_of(original: type[nn.Module]) -> type[Experts]:
    return type(f"Quantized{original.__name__}", (Experts, original), {})


def _new(original: type[nn.Module]) -> Experts:
    made = _class_of(original)
    return made.__new__(made)
