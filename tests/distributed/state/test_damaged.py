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
from distributed.optim.cases import model_bytes
from distributed.run import on_ranks
from distributed.state.cases import on_rank_0
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

MUTATIONS = 60


def build(world, seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(32, 16, dtype=torch.bfloat16) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.LayerNorm(16), nn.Linear(16, 32, dtype=torch.bfloat16), layers[1])
    model = model.to(world.device)
    zerofp4.convert_model(model, filter_fn=lambda *_: True)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=0.1 * (1 + seed))
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
    source, size = draw.randrange(len(new)), draw.choice((16, 64, 512))
    removed, put = {
        "flip": (1, [new[at] ^ 1 << draw.randrange(8)]),
        "cut": (len(new), b""),
        "add": (0, b"x"),
        "delete": (draw.choice((1, 2, 8)), b""),
        "zeros": (64, bytes(len(new[at : at + 64]))),
        "copy": (size, new[source : source + size]),
    }[draw.choice(("flip", "cut", "add", "delete", "zeros", "copy"))]
    new[at : at + removed] = put
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


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "optimizer.state.1.bias.exp_avg",
            dcp.CheckpointException,
            r"elements of 1.weight.exp_avg are not those that were saved",
        ),
        ("model.1.weight", ValueError, r"1.weight.exp_avg of a save without an id"),
    ],
)
def test_elements_of_another_tensor_are_refused(world, source, error, message):
    """The index points to a whole chunk of the same shape: with its checksum, or a model's without a seal."""
    path = Path(shared_folder(world))
    model, optimizer = build(world, 0)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    other, loaded = build(world, 1)
    before = contents(other, loaded, masters_of_fp32=False)

    def point_elsewhere():
        metadata = pickle.loads((path / ".metadata").read_bytes())
        storage = metadata.storage_data
        (chunk,) = [info for key, info in storage.items() if key.fqn == source]
        (place,) = [key for key in storage if key.fqn == "optimizer.state.1.weight.exp_avg"]
        storage[place] = chunk
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    on_rank_0(world, point_elsewhere)
    with pytest.raises(error, match=message):
        dcp.load({"model": other, "optimizer": loaded}, checkpoint_id=path)
    assert contents(other, loaded, masters_of_fp32=False) == before
