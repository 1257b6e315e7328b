"""Layers that begin with a normalization: LayerNormLinear and LayerNormMLP."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from zerofp4.nn.linear import Linear

NORMALIZATIONS: dict[str, type[nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def activation(x: torch.Tensor) -> torch.Tensor:
        gate, values = x.chunk(2, dim=-1)
        return function(gate) * values

    return activation


ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "gelu": (F.gelu, 1),
    "relu2": (lambda x: F.relu(x).square(), 1),
    "swiglu": (_gated(F.silu), 2),
    "geglu": (_gated(F.gelu), 2),
}
"""The function, and how many times ffn_hidden_size values it takes: the gate comes first."""


def _norm(size: int, eps: float, normalization: str, device, dtype) -> nn.Module:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {tuple(NORMALIZATIONS)}, got {normalization!r}")
    return NORMALIZATIONS[normalization](size, eps=eps, device=device, dtype=dtype)


class LayerNormLinear(nn.Module):
    """`linear(norm(x))`: a normalization over the last dimension, and a zerofp4.nn.Linear.

    Nothing is fused: the norm writes its output, and the linear layer reads it twice, for its amax and to
    quantize it. Autograd keeps only its quantized columnwise copy. The submodules are `norm` and `linear`.

    eps, normalization: of the norm, "LayerNorm" or "RMSNorm".
    The other arguments are Linear's. Raises ValueError for another normalization, and what Linear raises.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalization: str = "LayerNorm",
        primary_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ):
        super().__init__()
        options = {"primary_weights": primary_weights, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        self.linear = Linear(in_features, out_features, bias, device, dtype, **options)
        self.norm = _norm(in_features, eps, normalization, device, self.linear.weight.dtype)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """x [..., in_features] to [..., out_features]. is_first_microbatch and errors: as of Linear."""
        return self.linear(self.norm(x), is_first_microbatch)


class LayerNormMLP(nn.Module):
    """`fc2(activation(fc1(norm(x))))`: the feed-forward block of a transformer, without its residual.

    The submodules are `norm`, and the zerofp4.nn.Linear `fc1` and `fc2`, each with its own cache.

    hidden_size: features of x and of the result.
    ffn_hidden_size: input features of fc2. fc1 has as many outputs, or twice with a gate, which is first.
    activation: "gelu" (not approximated), "relu2" (the square of ReLU), "swiglu" (silu(gate) * values) or
        "geglu" (gelu(gate) * values).
    eps, normalization: as of LayerNormLinear.
    The other arguments are Linear's, for both layers. Raises ValueError for another activation or
    normalization, and what Linear raises.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        primary_weights: bool = False,
        fuse_wgrad_accumulation: bool = False,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        common = {"primary_weights": primary_weights, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        wide = ffn_hidden_size * ACTIVATIONS[activation][1]
        self.fc1 = Linear(hidden_size, wide, bias, device, dtype, **common)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, bias, device, dtype, **common)
        self.norm = _norm(hidden_size, eps, normalization, device, self.fc1.weight.dtype)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """x [..., hidden_size] to the same shape. is_first_microbatch and errors: as of Linear."""
        function, _ = ACTIVATIONS[self.activation]
        hidden = function(self.fc1(self.norm(x), is_first_microbatch))
        return self.fc2(hidden, is_first_microbatch)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
