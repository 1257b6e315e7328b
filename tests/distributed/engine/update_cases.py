"""A model whose weights are read in every way, and optimizers of it with and without overlap="update"."""

from __future__ import annotations

import torch
from cases.optim import keywords
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
TINY = 1e-4
"""bucket_mb for each parameter alone."""
SMALL = 0.02
"""For several."""
SERVED = [{"block": (1, 16), "columnwise": False}, {"four_over_six": zerofp4.FourOverSix()}]
"""Blocks whose scales travel with the codes."""


class Net(nn.Module):
    """A table that is both embedding and output layer, several layers, one of them used twice and one read
    without a gradient, too, one that some inputs do not reach, and a norm in FP32.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 64, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.rare = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, tokens, rare=True, reentrant=None, shared=True):
        """reentrant: how layers are recomputed; None for not at all. shared: a layer is used twice."""
        x = self.embedding(tokens)
        with torch.no_grad():
            constant = self.layers[3](x)
        x = x + constant
        for layer in [*self.layers, *([self.layers[1]] if shared else [])]:
            x = F.gelu(layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant))
        x = self.norm(x.float()).bfloat16()
        return F.linear(self.rare(x) if rare else x, self.embedding.weight).float()


def make(world, overlap="update", blocks=None, **options):
    """blocks: options of convert_model(); with columnwise copies unless they say otherwise."""
    torch.manual_seed(3)
    net = Net().to(world.device)
    zerofp4.convert_model(net, **{"columnwise": True} | (blocks or {}))
    options = OPTIONS | {"overlap": overlap} | options
    return net, ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **keywords(options))


def make_pair(world, **options):
    """Without overlap, and with updates in the backward pass."""
    return [make(world, overlap, **options) for overlap in (None, "update")]


def loss_of(net, world, seed, **how):
    generator = torch.Generator().manual_seed(100 * world.rank + seed)
    tokens = torch.randint(32, (16,), generator=generator).to(world.device)
    return F.cross_entropy(net(tokens, **how), (tokens * 5 + 3) % 32)


def step_of(world, models, seed, **how):
    """A backward pass and a step of each model, with equal losses."""
    losses = []
    for net, optimizer in models:
        loss = loss_of(net, world, seed, **how)
        loss.backward()
        if optimizer.describe()["overlap"] == "update" and how.get("rare", True):
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) == 1


def moved(net, optimizer, before):
    """The names of parameters whose masters are others than before."""
    pairs = zip(optimizer.gathered_masters(), before, net.named_parameters(), strict=True)
    return {name for now, then, (name, _) in pairs if not now.equal(then)}
