"""Layers of language models, for steps of fully_shard."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Shape(NamedTuple):
    """vocabulary: 0 for layers alone, which take and give what is between layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 0

    def reduced(self, scale: int, layers: int | None) -> "Shape":
        """With dimensions divided by scale and, where they are given, so many layers."""
        sizes = (self.hidden // scale, self.intermediate // scale, max(self.heads // scale, self.kv_heads))
        return Shape(layers or self.layers, *sizes, self.kv_heads, self.vocabulary // scale)


LLAMA_8B = Shape(8, 4096, 14336, 32, 8)
"""A quarter of Llama-3-8B: layers of 218 million parameters."""

QWEN_1_5B = Shape(28, 1536, 8960, 12, 2, 151936)
"""Qwen2.5-1.5B: 47 million parameters a layer, and an embedding that is the output layer too."""


class Block(nn.Module):
    """A layer without rotations."""

    def __init__(self, shape: Shape, linear: type[nn.Linear]):
        super().__init__()
        hidden, intermediate = shape.hidden, shape.intermediate
        self.heads = shape.heads, shape.kv_heads
        kv = hidden // shape.heads * shape.kv_heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.query, self.output = (linear(hidden, hidden, bias=False) for _ in range(2))
        self.key, self.value = (linear(hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norms[0](x)
        sizes = zip((self.query, self.key, self.value), (self.heads[0], *self.heads[1:] * 2), strict=True)
        query, key, value = (
            layer(given).unflatten(-1, (heads, -1)).transpose(-3, -2) for layer, heads in sizes
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(-3, -2).flatten(-2))
        given = self.norms[1](x)
        return x + self.down(F.silu(self.gate(given)) * self.up(given))


class Decoder(nn.Module):
    """The layers of a shape, from tokens to logits where it has an embedding."""

    def __init__(self, shape: Shape, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden) if shape.vocabulary else None
        self.blocks = nn.ModuleList(Block(shape, linear) for _ in range(shape.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.tokens is None else F.linear(x, self.tokens.weight)
