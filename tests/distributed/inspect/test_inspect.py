"""zerofp4 inspect of what several ranks saved, by one of them alone, and quantization_error on every rank."""

from __future__ import annotations

import contextlib
import io
import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases.fsdp2 import start, unsharded
from cases.optim import take_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from distributed.cases import shared_folder
from distributed.optim.cases import parameters_of
from distributed.run import on_ranks
from zerofp4 import quantization_error
from zerofp4.inspect import main
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def inspected(path) -> dict:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(printed.getvalue())
    found["tensors"] = {row["name"]: row for row in found["tensors"]}
    return found


def trained(world):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64)).bfloat16().to(world.device)
    zerofp4.convert_model(model, columnwise=True)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=0.1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p)
    optimizer.step()
    return model, optimizer


@on_ranks(2)
def test_chunks_of_all_ranks_are_one_tensor(world):
    model, optimizer = trained(world)
    masters = [master.abs().max().item() for master in optimizer.gathered_masters()]
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    values = {"nan": torch.tensor([math.nan, 1.0, 2.0, 3.0]), "last": torch.arange(4.0)}
    buffers = {name: distribute_tensor(x.to(world.device), mesh, [Shard(0)]) for name, x in values.items()}
    folder = shared_folder(world)
    dcp.save({"model": model, "optimizer": optimizer, "buffers": buffers}, checkpoint_id=folder)
    if world.rank == 1:
        found = inspected(folder)
        tensors = found["tensors"]
        assert found["ranks"] == world.world_size
        rows = [tensors[f"optimizer.state.{name}.master"] for name, _ in model.named_parameters()]
        assert [row["amax"] for row in rows] == masters
        assert [row["elements"] for row in rows] == [p.numel() for p in model.parameters()]
        assert (tensors["buffers.nan"]["amax"], tensors["buffers.last"]["amax"]) == ("nan", 3.0)
    dist.barrier()


@on_ranks(2)
def test_a_file_with_the_part_of_one_rank(world):
    _, optimizer = trained(world)
    folder, state_dict = shared_folder(world), optimizer.state_dict()
    path = folder / f"{world.rank}.pt"
    torch.save(state_dict, path)
    found = inspected(path)
    pieces = {number.name: entries["master"] for number, entries in state_dict["state"].items()}
    for name, piece in pieces.items():
        row = found["tensors"][f"state.{name}.master"]
        assert (row["elements"], row["shape"]) == (piece.values.numel(), list(piece.shape))
    assert found["parameters"] == sum(p.values.numel() for p in pieces.values()) < 64 * 32 * 2 + 96
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["inspect", str(path)]) == 0
    assert " elements of it)" in printed.getvalue()


@on_ranks(2)
def test_every_rank_has_the_numbers_of_the_whole_masters(world):
    """Those of a rank that has all of them. (inspect/test_error has what these are.)"""
    alone, texts = [dist.new_group([rank]) for rank in range(2)][world.rank], []
    for group in (alone, None):
        parameters = parameters_of(world)
        model = torch.nn.ParameterList(parameters)
        optimizer = ZeroFP4Optimizer(model.named_parameters(), lr=0.1, process_group=group)
        before = quantization_error(model, optimizer, keep_codes=True)
        take_step(parameters, optimizer, 0)
        report = quantization_error(model, optimizer, previous=before)
        assert any(record["flipped"] for record in report.records)
        texts.append(str(report))
    found: list = [None] * world.world_size
    dist.all_gather_object(found, texts)
    assert len({text for own in found for text in own}) == 1


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_weights_of_fsdp2_are_measured_while_they_are_gathered_as_codes(world, reshard_after_forward):
    """Sharded they are FP32 shards, and no NVFP4 weight; where layers get values they never are one."""
    run = start(world, kind={"block": (16, 16)}, reshard_after_forward=reshard_after_forward)
    count = len(list(run.model.parameters()))
    assert str(quantization_error(run.model)) == f"no NVFP4 weight ({count} other parameters)"
    run.step(0)
    masters = run.masters()
    with unsharded(run.model) as weights:
        report = quantization_error(run.model)
    if reshard_after_forward:
        assert report.records == [] and report.other_parameters == count
        return
    expected = []
    for name in weights:
        alone = torch.nn.ParameterDict({"w": zerofp4.quantize(masters[name])})
        for record in quantization_error(alone).records:
            expected.append(record | {"name": record["name"].replace("w", name)})
    assert report.records == expected and report.other_parameters == count - len(weights)
