"""A model whose gradients are made in every way, and optimizers of it that the tests of overlap compare."""

from __future__ import annotations

import torch
from helpers import assert_bytes_equal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from distributed.checks_optim import model_bytes, whole_state
from zerofp4.engine import CollectiveTransport
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
SMALL = 0.003
"""bucket_mb for several buckets."""
TINY = 1e-4
"""For each parameter alone, and in several stretches where gradients travel in messages."""

CLASSES = {"AdamW": torch.optim.AdamW, "FusedAdamW": FusedAdamW}


class Net(nn.Module):
    """Several layers, one that is used twice, one that some inputs do not reach, a norm and an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 48, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(48, 48, dtype=torch.bfloat16) for _ in range(4))
        self.norm = nn.LayerNorm(48)
        self.rare = nn.Linear(48, 48, dtype=torch.bfloat16)
        self.head = nn.Linear(48, 32, dtype=torch.bfloat16)

    def forward(self, tokens, rare=True, checkpointed=False):
        x = self.embedding(tokens)
        for layer in [*self.layers, self.layers[1]]:
            x = F.gelu(checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x))
        x = self.norm(x.float()).bfloat16()
        return self.head(self.rare(x) if rare else x).float()


def make(world, name="FusedAdamW", kind=ZeroFP4Optimizer, **options):
    """By collectives, unless another transport is named: early_peer_checks has ranks that share memory."""
    options.setdefault("transport", "collective")
    torch.manual_seed(3)
    net = Net().to(world.device)
    zerofp4.convert_model(net)
    optimizer = kind(net.named_parameters(), CLASSES[name], **OPTIONS, **options)
    return net, optimizer


def loss_of(net, world, seed, **options):
    generator = torch.Generator().manual_seed(100 * world.rank + seed)
    tokens = torch.randint(32, (16,), generator=generator).to(world.device)
    return F.cross_entropy(net(tokens, **options), (tokens * 5 + 3) % 32)


def all_bytes(net, optimizer):
    """Of weights, masters and moments, whole on every rank."""
    parameters = list(net.parameters())
    return [*model_bytes(parameters), *optimizer.gathered_masters(), *whole_state(parameters, optimizer)]


def assert_same(models, what):
    expected, *others = [all_bytes(*model) for model in models]
    for found in others:
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_bytes_equal(mine, theirs, f"{what}: tensor {i}")


def go_on(world, net, first, **options):
    """A few steps of an optimizer that goes on, in the same way, from another, which has sent what no step
    uses and sends nothing any more. options: that `first` was built with, other than transport and overlap.
    """
    loss_of(net, world, 0).backward()
    first.step()
    first.zero_grad()
    loss_of(net, world, 1).backward()  # travels
    described = first.describe()
    ways = {name: described[name] for name in ("transport", "overlap")}
    second = ZeroFP4Optimizer(
        net.named_parameters(), FusedAdamW, **OPTIONS, **ways, **options, masters_from=first
    )
    second.zero_grad()
    for step in range(2, 4):
        loss_of(net, world, step).backward()
        second.step()
        second.zero_grad()
    return net, second


def in_two_places(*arguments, **options):
    """A CollectiveTransport whose buckets arrive in two places, as on a GPU."""
    return CollectiveTransport(*arguments, **(options | {"early": options["early"] and 2}))


class Broken(Exception):
    """What a test raises in a pass."""


def break_off(net, world, where):
    """A backward pass that raises on the ranks which are told a module."""
    handle = None
    if where is not None:

        def refuse(*_):
            raise Broken

        handle = dict(net.named_modules())[where].register_full_backward_pre_hook(refuse)
    try:
        loss_of(net, world, 7).backward()
        assert where is None
    except Broken:
        assert where is not None
    if handle is not None:
        handle.remove()
