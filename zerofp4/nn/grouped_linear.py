"""GroupedLinear: a linear layer for each of several groups of rows."""

from collections.abc import Sequence

import torch
from torch import nn

from zerofp4.nn.grouped_function import GroupedFunction, why_one_by_one
from zerofp4.nn.linear import Linear, linear_call
from zerofp4.nn.recipe import NVFP4Recipe, current_recipe


class GroupedLinear(nn.Module):
    """`experts[g]` of the g-th group of consecutive rows, each a zerofp4.nn.Linear with a weight, an amax and
    a cache of its own: the bytes of one call for each group. Groups may be empty; their parameters get
    gradients of zeros.

    Under an NVFP4Recipe without four over six, by the exact backend on a GPU of Hopper's or Blackwell's kind,
    in bfloat16 with features in multiples of 8, all groups are quantized in one launch and multiplied in
    one, wherever the splits are; gemm/grouped.py says how that rounds. A bias then costs two passes over the
    output, and a weight's gradient reaches main_grad rounded to bfloat16. Everywhere else one product comes
    after another, and splits on a GPU are read back, which waits for it.

    num_gemms: the number of groups. in_features and what is behind it: as of Linear, for every expert.
    Raises ValueError for fewer than one group, and what Linear raises.
    """

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
        params_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if num_gemms < 1:
            raise ValueError(f"num_gemms must be at least 1, got {num_gemms}")
        options = {
            "primary_weights": primary_weights,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
        }
        self.experts = nn.ModuleList(
            Linear(in_features, out_features, bias, device, dtype, **options) for _ in range(num_gemms)
        )

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
            values = x if x.is_meta or not torch.is_autocast_enabled(x.device.type) else _by_autocast(x)
            features = self.experts[0].weight.shape
            if why_one_by_one(values, features, recipe) is None:
                return self._at_once(values, m_splits, recipe, is_first_microbatch)
        splits = self._splits(x, m_splits)
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
            splits = self._splits(x, m_splits)
        needs = torch.is_grad_enabled() and x.requires_grad
        calls = [linear_call(expert, expert.weight, recipe, is_first, needs) for expert in self.experts]
        biases = [expert.bias for expert in self.experts if expert.bias is not None]
        weights = [expert.weight for expert in self.experts]
        return GroupedFunction.apply(x, splits, recipe, calls, *weights, *biases)

    def _common_recipe(self) -> NVFP4Recipe | None:
        """What all experts compute by, if it is the same and one of NVFP4."""
        recipes = {current_recipe(expert) for expert in self.experts}
        recipe = recipes.pop()
        return recipe if not recipes and isinstance(recipe, NVFP4Recipe) else None

    def _check_input(self, x: torch.Tensor) -> None:
        if x.dim() != 2:
            raise ValueError(f"x must be [tokens, in_features], got shape {tuple(x.shape)}")

    def _check_count(self, count: int) -> None:
        if count != len(self.experts):
            raise ValueError(f"m_splits must have {len(self.experts)} entries, got {count}")

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


def _by_autocast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.get_autocast_dtype(x.device.type))
