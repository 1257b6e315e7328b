"""A GPT: pre-norm blocks of causal attention and MLP, learned positions, an untied output."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from examples.training.data import VOCABULARY


@dataclass(frozen=True)
class Preset:
    """A shape of the model, and what trains it well: `lr` is the peak for optimizers of Adam's family."""

    layers: int
    width: int
    heads: int
    context: int
    lr: float


# "85m" has the blocks of GPT-2 small; in "124m" more and wider ones stand in for its large embedding.
PRESETS = {
    "tiny": Preset(layers=2, width=64, heads=2, context=128, lr=3e-3),
    "1m": Preset(layers=5, width=128, heads=4, context=256, lr=3e-3),
    "10m": Preset(layers=6, width=384, heads=6, context=512, lr=1e-3),
    "85m": Preset(layers=12, width=768, heads=12, context=1024, lr=6e-4),
    "124m": Preset(layers=16, width=800, heads=10, context=1024, lr=6e-4),
}


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens [batch, length] (int64, length <= context) to float32 logits [batch, length, VOCABULARY]."""

    def __init__(self, preset: Preset):
        super().__init__()
        self.preset = preset
        self.tokens = nn.Embedding(VOCABULARY, preset.width)
        self.positions = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.ModuleList(Block(preset.width, preset.heads) for _ in range(preset.layers))
        self.norm = nn.RMSNorm(preset.width)
        self.head = nn.Linear(preset.width, VOCABULARY, bias=False)
        self.initialize()

    def initialize(self) -> None:
        """Linear layers keep the variance of their input; what adds to the residual stream starts smaller."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
        for block in self.blocks:
            for layer in (block.projection, block.down):
                nn.init.normal_(layer.weight, std=(2 * self.preset.layers * layer.in_features) ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in nats per token."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of named parameters: the matrices of linear layers decay; embeddings and norms do not."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decays: list[tuple[str, nn.Parameter]] = []
    stays: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        decay = parameter.dim() == 2 and id(parameter) not in embeddings
        (decays if decay else stays).append((name, parameter))
    return [{"params": decays, "weight_decay": weight_decay}, {"params": stays, "weight_decay": 0.0}]
