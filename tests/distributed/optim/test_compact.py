"""ZeroFP4Optimizer(state="compact") over several ranks: the same bytes at any world size, also resharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients, take_step
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.optim.cases import assert_same_on_all_ranks, model_bytes, whole_state
from distributed.optim.compact_cases import HYPERS, Whole, make_sharded
from distributed.optim.fused_cases import COMPACT_STATE
from distributed.run import on_ranks
from zerofp4 import reference
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def build(parameters, group=None, **options):
    named = [(f"weight {i}", p) for i, p in enumerate(parameters)]
    options = keywords(HYPERS, {"state": "compact"} | options)
    return ZeroFP4Optimizer(named, FusedAdamW, process_group=group, **options)


def run(parameters, optimizer, steps):
    """Gradients that depend on the step alone, and one is missing."""
    for step in steps:
        gradients = make_gradients(parameters, step)
        gradients[step % len(gradients)] = None
        set_gradients(parameters, gradients)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2, 3, nightly=[4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_mb": 0.01, "overlap": "backward"},
        {"bucket_mb": 0.01, "overlap": "forward"},
        {"bucket_mb": 0.003, "reduction": "reduce_scatter", "gradient_wire": torch.float32},
    ],
)
def test_the_bytes_of_the_reference_at_any_world_size(world, options):
    """Each rank has whole groups. One step is skipped, for an infinity of the last rank; the last one is
    clipped.
    """
    parameters = make_sharded(world.device)
    expected, optimizer = Whole(parameters), build(parameters, **options)
    expected.check(optimizer, "at the start:")
    for step in range(4):
        made = zip(parameters, make_gradients(parameters, step), strict=True)
        gradients = [gradient.to(p.dtype) for p, gradient in made]
        if step == 1:
            gradients[3] = None
        if step == 2 and world.rank == world.world_size - 1:
            gradients[0][3, 5] = torch.inf
        pairs = zip(parameters, gradients, strict=True)
        sum((p * g).float().sum() for p, g in pairs if g is not None).backward()
        factor = None
        if step == 3:
            norm = optimizer.clip_grad_norm_(0.5)
            factor = (0.5 / (norm + 1e-6)).clamp(max=1.0).cpu()
        optimizer.step()
        optimizer.zero_grad()
        if step != 2:
            expected.step(gradients, factor)
        assert optimizer.skipped_steps == (step >= 2)
        expected.check(optimizer, f"step {step}:")
    assert_same_on_all_ranks(model_bytes(parameters), optimizer.process_group())


@on_ranks(2, 3)
def test_gradients_that_differ(world):
    """An update that adds them up as it reads them, and one of means, are the same."""
    one, other = make_sharded(world.device), make_sharded(world.device)
    pair = [(one, build(one)), (other, build(other, bucket_mb=0.003))]
    for step in range(3):
        for parameters, optimizer in pair:
            set_gradients(parameters, make_gradients(parameters, 10 * step + world.rank))
            if step == 2 and parameters is other:
                optimizer.clip_grad_norm_(1e9)
            optimizer.step()
    states = [whole_state(parameters, optimizer) for parameters, optimizer in pair]
    assert_all_equal(*states, "state")


@on_ranks(4)
def test_replicas(world):
    """Two pairs of ranks, each of which has the model, sharded."""
    mesh = init_device_mesh(world.device.type, (2, 2))
    parameters = make_sharded(world.device)
    expected = Whole(parameters)
    groups = [{"params": parameters, "process_group": mesh}]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, **HYPERS, state="compact")
    for step in range(2):
        take_step(parameters, optimizer, step)
        expected.step([p.grad for p in parameters])
    expected.check(optimizer)


@on_ranks(2)
def test_replicas_have_one_number(world):
    """Their random bytes are those of it. Here a rank has one or two parameters of its own before it."""
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    mesh = init_device_mesh(world.device.type, (2, 1))
    own, shared = ([torch.zeros(4, 64, device=world.device) for _ in range(n)] for n in (1 + world.rank, 1))
    groups = [
        {"params": [nn.Parameter(p) for p in own], "process_group": alone},
        {"params": [nn.Parameter(p) for p in shared], "process_group": mesh},
    ]
    ZeroFP4Optimizer(groups, FusedAdamW, lr=1e-3)
    with pytest.raises(ValueError, match=r"compact state as number 1.* compact state as number 2"):
        ZeroFP4Optimizer(groups, FusedAdamW, lr=1e-3, state="compact")


# Checkpoints


@on_ranks(1, 2, 3)
def test_full_state_loads_into_compact_and_back(world):
    """Masters of 24 bits are those next to what was there, and come back as they are; moments are what
    FusedAdamW alone makes of them.
    """
    parameters = make_sharded(world.device)
    full = build(parameters, state="full")
    run(parameters, full, range(2))
    whole = [{name: piece.full_tensor() for name, piece in full.state[p].items()} for p in parameters]
    others = make_sharded(world.device, seed=3)
    compact = build(others)
    compact.load_state_dict(full.state_dict())
    assert compact.param_groups[0]["state"] == "compact"
    alone = FusedAdamW([entries["master"].clone() for entries in whole], **HYPERS, state="compact")
    moments = {i: {k: v for k, v in entries.items() if k != "master"} for i, entries in enumerate(whole)}
    alone.load_state_dict({"state": moments, "param_groups": alone.state_dict()["param_groups"]})
    masters = compact.gathered_masters()
    rows = zip(others, masters, whole, alone.state.values(), strict=True)
    for q, master, entries, state in rows:
        expected = entries["master"].cpu()
        if Whole.is_split(q):
            expected = reference.round_master(expected, torch.tensor(128))
        assert_bytes_equal(master.cpu(), expected, "master")
        for name in filter(state.__contains__, COMPACT_STATE):
            assert_bytes_equal(compact.state[q][name].full_tensor(), state[name], name)
    last = make_sharded(world.device, seed=5)
    back = build(last, state="full", bucket_mb=0.002)
    back.load_state_dict(compact.state_dict())
    assert_all_equal(back.gathered_masters(), masters, "master")
    again = FusedAdamW([entries["master"].clone() for entries in whole], **HYPERS)
    again.load_state_dict(alone.state_dict())
    for p, state in zip(last, again.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert_bytes_equal(back.state[p][name].full_tensor(), state[name], name)
