"""A model whose gradients are made in every way, and optimizers of it that the tests of overlap compare."""

import contextlib

import torch
from cases.optim import assert_all_equal, keywords
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from distributed.engine.update_cases import OPTIONS, TINY, loss_of
from distributed.optim.cases import all_bytes
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

__all__ = ["OPTIONS", "TINY", "loss_of"]  # what other files take from here, too

SMALL = 0.003
"""bucket_mb for several buckets; TINY is one for several stretches of gradients, too."""

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
    """By collectives, unless another transport is named: overlap_checks has ranks that share memory."""
    options.setdefault("transport", "collective")
    torch.manual_seed(3)
    net = Net().to(world.device)
    zerofp4.convert_model(net, columnwise=True)
    optimizer = kind(net.named_parameters(), CLASSES[name], **keywords(OPTIONS, options))
    return net, optimizer


def step_of(world, models, seed, **options):
    """A backward pass and a step of each model."""
    for net, optimizer in models:
        loss_of(net, world, seed, **options).backward()
        optimizer.step()
        optimizer.zero_grad()


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


def go_on(world, net, first):
    """A few steps of an optimizer that goes on, in the same way, from another, which has sent what no step
    uses and sends nothing any more.
    """
    step_of(world, [(net, first)], 0)
    loss_of(net, world, 1).backward()  # travels
    described = first.describe()
    ways = {name: described[name] for name in ("transport", "overlap", "bucket_mb")}
    ways |= {"process_group": first.process_group(), "masters_from": first}
    second = ZeroFP4Optimizer(net.named_parameters(), FusedAdamW, **keywords(OPTIONS, ways))
    second.zero_grad()
    for step in range(2, 4):
        step_of(world, [(net, second)], step)
    return net, second


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
