"""Checkpoints of experts, of which ranks hold different ones."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal, keywords, through_a_file
from torch import nn

import zerofp4
from distributed.cases import shared_folder
from distributed.optim.cases import model_bytes
from distributed.optim.group_cases import Mixture, expert_group, named
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def build(model: Mixture, group: dist.ProcessGroup, name: str | None = None, **options) -> ZeroFP4Optimizer:
    """name: of the experts; by default one that says which they are."""
    prefix = f"experts.{model.kind}" if name is None else name
    groups = [
        {"params": named(model.dense, "dense")},
        {"params": named(model.experts, prefix), "process_group": group, "weight_decay": 0.3},
    ]
    return ZeroFP4Optimizer(groups, FusedAdamW, **keywords(OPTIONS | options))


def run(model: Mixture, optimizer: ZeroFP4Optimizer, steps: range) -> None:
    for step in steps:
        for p, gradient in zip(model.parameters, model.gradients(0, step), strict=True):
            p.grad = gradient
        optimizer.step()


def build_all(world, seed: int) -> ZeroFP4Optimizer:
    """Of the dense parameters and the experts of both kinds, on every rank."""
    kinds = [Mixture(world, kind, seed) for kind in (0, 1)]
    experts = [pair for m in kinds for pair in named(m.experts, f"experts.{m.kind}")]
    groups = [{"params": named(kinds[0].dense, "dense")}, {"params": experts, "weight_decay": 0.5}]
    return ZeroFP4Optimizer(groups, FusedAdamW, **keywords(OPTIONS | {"lr": 0.5}))


@on_ranks(2, 4, time_limit=120)
def test_a_run_goes_on_with_its_experts_on_other_ranks(world):
    """Saved where each rank has half of the experts, loaded there and where each rank has all of them, and
    the other way round.
    """
    group, folder, second = expert_group(world), shared_folder(world), shared_folder(world)
    through = Mixture(world)
    straight = build(through, group)
    run(through, straight, range(2))
    dcp.save({"optimizer": straight}, checkpoint_id=folder)
    run(through, straight, range(2, 4))
    expected = straight.gathered_masters()

    def resume(path, seed):
        resumed = Mixture(world, seed=seed)
        optimizer = build(resumed, group, lr=0.5)
        dcp.load({"optimizer": optimizer}, checkpoint_id=path)
        assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.02]
        run(resumed, optimizer, range(2, 4))
        assert_all_equal(optimizer.gathered_masters(), expected, "master")
        assert_all_equal(model_bytes(resumed.parameters), model_bytes(through.parameters), "weight")

    resume(folder, 7)
    whole = build_all(world, seed=9)
    dcp.load({"optimizer": whole}, checkpoint_id=folder)
    assert [(g["lr"], g["weight_decay"]) for g in whole.param_groups] == [(0.02, 0.1), (0.02, 0.3)]
    dcp.save({"optimizer": whole}, checkpoint_id=second)
    resume(second, 11)


@on_ranks(2, 4, time_limit=60)
@pytest.mark.parametrize("name", ["experts", ""])
def test_a_name_that_is_another_parameter_elsewhere_is_refused(world, name):
    """In files that ranks write together; what each rank writes for itself is its own."""
    group = expert_group(world)

    def make(seed):
        model = Mixture(world, seed=seed)
        if name:
            return model, build(model, group, name)
        return model, ZeroFP4Optimizer(model.param_groups(group), FusedAdamW, **OPTIONS)

    model, optimizer = make(0)
    run(model, optimizer, range(2))
    with pytest.raises(dcp.api.CheckpointException, match="another on ranks"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=shared_folder(world))
    _, resumed = make(5)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_all_equal(resumed.gathered_masters(), optimizer.gathered_masters(), "master")


@on_ranks(2, 4, time_limit=60)
def test_masters_of_what_a_rank_has(world):
    """In its own keys; rank 0 would write a model that lacks the others' experts."""
    mixture = Mixture(world)
    model = nn.Module()
    for name, p in [*named(mixture.dense, "dense"), *named(mixture.experts, "experts")]:
        model.register_parameter(name.replace(".", "_"), p)
    optimizer = build(mixture, expert_group(world))
    run(mixture, optimizer, range(1))
    found = list(zerofp4.master_state_dict(model, optimizer))
    assert [key for key, _ in found] == list(model.state_dict())
    assert_all_equal([value for _, value in found], optimizer.gathered_masters(), "master")
    with pytest.raises(ValueError, match=r"save_safetensors\(\) needs .* other ranks train other"):
        zerofp4.save_safetensors(model, shared_folder(world), optimizer)
