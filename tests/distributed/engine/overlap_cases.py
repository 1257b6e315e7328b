"""A model whose gradients are made in every way, and optimizers of it with and without overlap."""

from __future__ import annotations

import contextlib

import torch
from cases.optim import assert_all_equal, keywords
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from distributed.optim.cases import all_bytes
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
TINY = 1e-4
"""bucket_mb for each parameter alone."""
SMALL = 0.02
"""For several."""
CLASSES = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}


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


def make(world, name="FusedAdamW", *, blocks=None, **options):
    """blocks: options of convert_model(); with columnwise copies unless they say otherwise. By collectives,
    unless another transport is named.
    """
    torch.manual_seed(3)
    net = Net().to(world.device)
    zerofp4.convert_model(net, **{"columnwise": True} | (blocks or {}))
    options = OPTIONS | {"transport": "collective"} | options
    return net, ZeroFP4Optimizer(net.named_parameters(), CLASSES[name], **keywords(options))


def make_updating(world, **options):
    """With updates in backward passes."""
    return make(world, overlap="update", **options)


def make_pair(world, overlap="update", **options):
    """Without overlap, and with it."""
    return [make(world, overlap=way, **options) for way in (None, overlap)]


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


def bytes_of(net, optimizer):
    return all_bytes(list(net.parameters()), optimizer)


def assert_same(models, what):
    expected, *others = [bytes_of(*model) for model in models]
    for found in others:
        assert_all_equal(found, expected, what)


@contextlib.contextmanager
def nothing_changes(*model):
    before = [tensor.clone() for tensor in bytes_of(*model)]
    yield
    assert_all_equal(bytes_of(*model), before, "nothing changes")


def moved(net, optimizer, before):
    """The names of parameters whose masters are others than before."""
    pairs = zip(optimizer.gathered_masters(), before, net.named_parameters(), strict=True)
    return {name for now, then, (name, _) in pairs if not now.equal(then)}


class Broken(Exception):
    """What a test raises in a pass."""


def break_off(net, world, where):
    """A backward pass that raises on the ranks which are told a module."""

    def refuse(*_):
        raise Broken

    handle = where and dict(net.named_modules())[where].register_full_backward_pre_hook(refuse)
    try:
        loss_of(net, world, 7).backward()
        assert where is None
    except Broken:
        handle.remove()
