"""Files of dcp.save in which something was changed: refused, or the change said nothing. Nothing crashes."""

from __future__ import annotations

import logging
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zerofp4
from distributed.cases import shared_folder
from distributed.checks_optim import Injected, model_bytes
from distributed.run import on_ranks
from zerofp4.optim import FusedAdamW

MUTATIONS = 60


def build(world, seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 16, dtype=torch.bfloat16) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.LayerNorm(16), nn.Linear(16, 32, dtype=torch.bfloat16), layers[1])
    model = model.to(world.device)
    zerofp4.convert_model(model, filter_fn=lambda *_: True)
    optimizer = Injected(model.named_parameters(), FusedAdamW, lr=0.1 * (1 + seed))
    for _ in range(2 + seed):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape, device=p.device).to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()


def contents(model, optimizer, masters_of_fp32=True) -> list:
    """All that a load may change. FP32 parameters are their own masters, and torch reads a model in place."""
    state = optimizer.state_dict()
    found = [int(state["steps"]), repr([dict(group) for group in state["param_groups"]])]
    for p, entries in zip(model.parameters(), state["state"].values(), strict=True):
        for name, value in entries.items():
            if masters_of_fp32 or name != "master" or p.dtype != torch.float32:
                found.append((name, value.values.cpu().numpy().tobytes()))
    return found


def weights(model) -> list[bytes]:
    return [buffer.cpu().numpy().tobytes() for buffer in model_bytes(list(model.parameters()))]


def changed(content: bytes, elements: bytes, draw: random.Random) -> bytes:
    """Half of the changes are among the elements, which no parser looks at."""
    new, at = bytearray(content), draw.randrange(len(content))
    if elements in content and draw.random() < 0.5:
        at = content.index(elements) + draw.randrange(len(elements))
    kind = draw.choice(("flip", "byte", "cut", "add", "delete", "zeros", "copy"))
    if kind == "flip":
        new[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        new[at] = draw.randrange(256)
    elif kind == "cut":
        del new[at:]
    elif kind == "add":
        new[at:at] = b"x"
    elif kind == "delete":
        del new[at : at + draw.choice((1, 2, 8))]
    elif kind == "zeros":
        new[at : at + 64] = bytes(len(new[at : at + 64]))
    else:
        source, size = draw.randrange(len(new)), draw.choice((16, 64, 512))
        new[at : at + size] = new[source : source + size]
    return bytes(new)


@on_ranks(1, 2, time_limit=180.0)
def test_changed_files_are_refused(world):
    """Or what was loaded is what was saved, to the byte: a change in a model's weight is undone by its
    master. After a refusal the optimizer is as it was, and never steps with weights that torch has read.
    """
    logging.disable(logging.CRITICAL)  # torch logs a traceback of each
    path, draw = Path(shared_folder(world)), random.Random(world.world_size)  # rank 0 alone draws
    model, optimizer = build(world, 0)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    expected = contents(model, optimizer), weights(model)
    own = optimizer.state_dict()["state"][2]["master"].values.cpu().numpy().tobytes()
    elements: list = [None] * world.world_size
    dist.all_gather_object(elements, own)
    files, refused = sorted(path.iterdir()), 0
    for _ in range(MUTATIONS):
        if world.rank == 0:
            file = draw.choice(files)
            content = file.read_bytes()
            file.write_bytes(changed(content, max(elements, key=len), draw))
        dist.barrier()
        other, loaded = build(world, 1)
        before = contents(other, loaded, masters_of_fp32=False), weights(other)
        try:
            dcp.load({"model": other, "optimizer": loaded}, checkpoint_id=path)
        except (Exception, dcp.CheckpointException) as error:
            refused += 1
            assert contents(other, loaded, masters_of_fp32=False) == before[0], error
            written: list = [None] * world.world_size
            dist.all_gather_object(written, weights(other) != before[1])
            if any(written):  # torch may have read those of one rank alone, of which the others hear
                here = "was written to since the last step"
                others = "found an error, and no rank takes this step"
                with pytest.raises(RuntimeError, match=here if written[world.rank] else others):
                    step(other, loaded)
        else:
            assert (contents(other, loaded), weights(other)) == expected
        dist.barrier()
        if world.rank == 0:
            file.write_bytes(content)
        dist.barrier()
    assert refused > MUTATIONS // 2
    logging.disable(logging.NOTSET)


@on_ranks(2)
def test_elements_of_another_parameter_are_refused(world):
    """The index points to a chunk of the same size, whole and with its checksum."""
    path = Path(shared_folder(world))
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(2)).to(world.device)
    optimizer = Injected(model.named_parameters(), FusedAdamW)
    step(model, optimizer)
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    before = contents(model, optimizer)
    if world.rank == 0:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        storage = metadata.storage_data
        name = "optimizer.state.{}.weight.exp_avg"
        one, other = ([k for k in storage if k.fqn == name.format(i)] for i in (0, 1))
        assert len(one) == len(other) == 1  # a rank has each
        storage[one[0]], storage[other[0]] = storage[other[0]], storage[one[0]]
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    dist.barrier()
    message = r"elements of 0.weight.exp_avg of shape \(32, 16\) from 0 on are in the file where those of 1"
    with pytest.raises(dcp.CheckpointException, match=message):
        dcp.load({"optimizer": optimizer}, checkpoint_id=path)
    assert contents(model, optimizer) == before


@on_ranks(1, 2)
def test_elements_of_a_model_are_refused(world):
    """The index points to a weight of the model, of the same shape: whole, and without a seal."""
    path = Path(shared_folder(world))
    model, optimizer = build(world, 0)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    other, loaded = build(world, 1)
    before = contents(other, loaded, masters_of_fp32=False)
    if world.rank == 0:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        storage = metadata.storage_data
        (weight,) = (key for key in storage if key.fqn == "model.1.weight")
        for key in storage:
            if key.fqn == "optimizer.state.1.weight.exp_avg":
                storage[key] = storage[weight]
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    dist.barrier()
    with pytest.raises(ValueError, match=r"1.weight.exp_avg of a save without an id"):
        dcp.load({"model": other, "optimizer": loaded}, checkpoint_id=path)
    assert contents(other, loaded, masters_of_fp32=False) == before
