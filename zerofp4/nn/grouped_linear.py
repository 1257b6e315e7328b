"""GroupedLinear: a linear layer for each of several groups of rows."""

from collections.abc import Sequence

import torch
from torch import nn

from zerofp4.nn.linear import Linear


class GroupedLinear(nn.Module):
    """`experts[g]` of the g-th group of consecutive rows, each a zerofp4.nn.Linear with a weight, an amax and
    a cache of its own: the bytes of one call for each group. Groups may be empty; their parameters get
    gradients of zeros.

    One product after another: on a GPU the launches of small groups cost more than their arithmetic.

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

        m_splits: the rows of each group, num_gemms of them: integers, or a tensor of integers, which is read
        back when it is on a GPU (that waits for the device).
        is_first_microbatch: as of Linear, for all experts. Raises ValueError for other splits, TypeError for
        what are no integers, and what Linear raises.
        """
        splits = self._splits(x, m_splits)
        pieces = x.split(splits)
        outputs = [
            expert(piece, is_first_microbatch) for expert, piece in zip(self.experts, pieces, strict=True)
        ]
        return torch.cat(outputs)

    def _splits(self, x: torch.Tensor, m_splits: Sequence[int] | torch.Tensor) -> list[int]:
        if x.dim() != 2:
            raise ValueError(f"x must be [tokens, in_features], got shape {tuple(x.shape)}")
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if not all(isinstance(rows, int) for rows in splits):
            raise TypeError(f"m_splits must be integers, got {splits}")
        if len(splits) != len(self.experts):
            raise ValueError(f"m_splits must have {len(self.experts)} entries, got {len(splits)}")
        if min(splits) < 0 or sum(splits) != x.shape[0]:
            raise ValueError(
                f"m_splits must not be negative and must sum to the {x.shape[0]} rows of x, got {splits}"
            )
        return splits
