"""A model whose gradients are made in every way, optimizers of it with and without overlap, and what ranks do
with gradients that travel in backward passes: by collectives, through the memory that GPUs share or, with
FilePeers, through files on the CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4
from distributed.optim.cases import all_bytes, raise_in_turn
from zerofp4.distributed import all_gather_slices
from zerofp4.engine import Bucket, CollectiveExchange
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.testing import verify_model

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


def assert_same(models, what):
    expected, *others = [all_bytes(list(net.parameters()), optimizer) for net, optimizer in models]
    for found in others:
        assert_all_equal(found, expected, what)


@contextlib.contextmanager
def nothing_changes(net, optimizer):
    parameters = list(net.parameters())
    before = [tensor.clone() for tensor in all_bytes(parameters, optimizer)]
    yield
    assert_all_equal(all_bytes(parameters, optimizer), before, "nothing changes")


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


class LateGather:
    """A gather of codes that takes long, on a GPU, and on the CPU does not begin before somebody waits for
    it: who reads without that finds codes of the step before. (Ranks must wait for them in one order.)
    """

    def __init__(self, buffer: Bucket, begun: list[Bucket]):
        self._buffer, self._begun = buffer, begun
        self._cast = torch.cuda.current_stream().record_event() if buffer.device.type == "cuda" else None

    def wait(self) -> None:
        self._begun.append(self._buffer)
        if self._cast is not None:
            self._cast.wait()
            torch.cuda._sleep(20_000_000)
        for flat in self._buffer.gathered:
            all_gather_slices(flat, self._buffer.group())


@contextlib.contextmanager
def late_gathers() -> Iterator[list[Bucket]]:
    """Gathers of codes that begin in here are such; of which buffers somebody has waited for, in order."""
    begun: list[Bucket] = []
    gather_now = CollectiveExchange.gather

    def gather(exchange):
        bucket = exchange.bucket
        return LateGather(bucket, begun) if bucket.is_packed else gather_now(exchange)

    with mock.patch.object(CollectiveExchange, "gather", gather):
        yield begun


# What is checked of it

FOUND = "found an error, and no rank takes this step"


def gpu_of(world) -> torch.device:
    """This rank's; with gloo one that it may have in common with others."""
    if world.device.type == "cuda":
        return world.device
    device = torch.device("cuda", world.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def on_gpu(world, check, **options):
    alike = SimpleNamespace(rank=world.rank, world_size=world.world_size, device=gpu_of(world))
    globals()[check](alike, transport="peer", **options)


def make_models(world, name="FusedAdamW", overlaps=("backward",), transport="collective", **options):
    """One without overlap, and one of each way of it; with peers also one by collectives, where they have
    such on their device. Each in a group of its own: what one sends in a pass that breaks off would arrive in
    place of what another sends next.
    """
    ways = [{"transport": transport, "overlap": overlap} for overlap in (None, *overlaps)]
    if transport == "peer" and (world.device.type == "cpu" or dist.get_backend() == "nccl"):
        ways.append({"transport": "collective"})
    if transport == "collective":
        ways = [{**way, "process_group": dist.new_group()} for way in ways]
    models = [make(world, name, **way, **options) for way in ways]
    described = models[1][1].describe()
    assert described["overlap"] == overlaps[0]
    assert described["transport"] == (transport if world.world_size > 1 else "none")
    return models


def whole_steps(world, clip=False, overlaps=("backward", "forward", "both"), **options):
    """Of real gradients: a weight used twice, one that only some ranks use, recomputed segments, a rank
    without a backward pass, autograd.grad in between, gradients that are dropped before a step, zeros in
    place of None, checkpoints that one model takes over from another, and a pass in a closure.
    """
    models, updates = make_models(world, overlaps=overlaps, **options), overlaps[0] == "update"
    for step in range(5):
        norms, reentrant = [], (None, False, True)[step % 3]
        how = {"rare": (step + world.rank) % 3 > 0, "reentrant": reentrant, "shared": not reentrant}
        for net, optimizer in models:
            if not reentrant:  # which autograd.grad does not go through
                torch.autograd.grad(loss_of(net, world, 50 + step), list(net.parameters()))
            if step in (1, 3) and not updates:  # sent, and dropped
                loss_of(net, world, 70 + step).backward()
                optimizer.zero_grad(set_to_none=step == 1)

            def backward(net=net, step=step, how=how):
                if step != 3 or world.rank:
                    loss_of(net, world, step, **how).backward()

            in_step = step == 4 and not clip
            if not in_step:
                backward()
            own = [optimizer.clip_grad_norm_(0.1).item()] if clip else []
            if clip and step == 2:  # what was reduced is read no more, on no rank
                optimizer.zero_grad()
                loss_of(net, world, 90).backward()
                own.append(optimizer.clip_grad_norm_(0.05).item())
            optimizer.step(backward if in_step else None)
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            norms.append(own)
        assert all(own == norms[0] for own in norms)
        assert_same(models, f"step {step}")
        if step == 2:
            states = [optimizer.state_dict() for _, optimizer in models]
            for (_, optimizer), state in zip(models, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    for net, optimizer in models:
        assert optimizer.state_dict()["steps"] == 5
        verify_model(net, optimizer, process_group=optimizer.process_group())


EVENTS = "nan", "closure", "changed", "rare", "layers.0", "layers.2", "data", "replaced", "nan", "kept"


def nothing_comes_of_it(world, name="FusedAdamW", **options):
    """Steps that no rank takes, for a NaN, for an error of one rank, for a gradient that changed or was
    replaced, and passes that break off in a module of one rank: what was sent for them is in no later step.
    """
    models = make_models(world, name, **options)
    last = world.rank == world.world_size - 1
    for step, event in enumerate(EVENTS):
        for net, optimizer in models:
            if event in ("rare", "layers.0", "layers.2"):  # none, most or some of it was sent
                break_off(net, world, event if last else None)
                optimizer.zero_grad()
            else:
                fail(world, net, optimizer, event, last)
            if event not in ("replaced", "kept"):
                optimizer.zero_grad(set_to_none=step % 2 > 0)
                loss_of(net, world, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(models, f"step {step}, after {event}")


def fail(world, net, optimizer, event, last):
    """A backward pass, and a step that comes to nothing."""
    hook = net.rare.weight.register_hook(lambda g: g * (math.inf if event == "nan" and last else 1))
    loss_of(net, world, 20).backward()
    hook.remove()
    changes = event in ("changed", "data", "replaced")  # "data": a write that no version counts

    def closure():
        if last and not changes:
            raise RuntimeError("no loss today")

    with nothing_changes(net, optimizer):
        if changes and last:
            grad = net.rare.weight.grad
            (grad.data if event == "data" else grad).mul_(2)
            if event == "replaced":
                net.rare.weight.grad = grad.clone()
        if event == "nan":
            skipped = optimizer.skipped_steps
            optimizer.step()
            assert optimizer.skipped_steps == skipped + 1 and "rare" in optimizer.first_nonfinite()
        elif not changes or optimizer.describe()["overlap"] is not None:
            mine = "changed after it had begun" if changes else "no loss today"
            with pytest.raises(RuntimeError, match=mine if last else FOUND):
                raise_in_turn(optimizer, lambda: optimizer.step(closure))
