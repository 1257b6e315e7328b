"""zerofp4 inspect of what several ranks saved, by one of them alone."""

from __future__ import annotations

import contextlib
import io
import json
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from distributed.cases import shared_folder
from distributed.run import on_ranks
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
