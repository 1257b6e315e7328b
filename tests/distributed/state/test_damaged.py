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

from distributed.run import on_ranks
from distributed.state.cases import contents, on_rank_0, saved, trained

MUTATIONS = 60


def changed(content: bytes, elements: bytes, draw: random.Random) -> bytes:
    """Half of the changes are among the elements, which no parser looks at."""
    new, at = bytearray(content), draw.randrange(len(content))
    if elements in content and draw.random() < 0.5:
        at = content.index(elements) + draw.randrange(len(elements))
    source = draw.randrange(len(new))
    removed, put = draw.choice(
        [
            (1, [new[at] ^ 1 << draw.randrange(8)]),
            (len(new), b""),
            (0, b"x"),
            (2, b""),
            (64, bytes(len(new[at : at + 64]))),
            (64, new[source : source + 64]),
        ]
    )
    new[at : at + removed] = put
    return bytes(new)


@on_ranks(1, 2, time_limit=180.0)
def test_changed_files_are_refused(world):
    """Or what was loaded is what was saved, to the byte. After a refusal the optimizer is as it was."""
    logging.disable(logging.CRITICAL)  # torch logs a traceback of each
    draw = random.Random(world.world_size)  # rank 0 alone draws
    model, optimizer = trained(world, 2, "fused")
    path, expected = Path(saved(world, optimizer)), contents(model, optimizer)
    own = optimizer.state[model.second.weight]["master"].values.cpu().numpy().tobytes()
    elements: list = [None] * world.world_size
    dist.all_gather_object(elements, own)
    other, loaded = trained(world, 3, "fused", seed=1)
    before = contents(other, loaded)
    files, refused = sorted(path.iterdir()), 0
    for _ in range(MUTATIONS):
        if world.rank == 0:
            file = draw.choice(files)
            content = file.read_bytes()
            file.write_bytes(changed(content, max(elements, key=len), draw))
        dist.barrier()
        try:
            dcp.load({"optimizer": loaded}, checkpoint_id=path)
        except (Exception, dcp.CheckpointException) as error:
            refused += 1
            assert contents(other, loaded) == before, error
        else:
            assert contents(other, loaded) == expected
            other, loaded = trained(world, 3, "fused", seed=1)
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
            "optimizer.state.first.bias.exp_avg_sq",
            dcp.CheckpointException,
            r"elements of first.bias.exp_avg are not those that were saved",
        ),
        ("beside", ValueError, "mixes saves: [0-9a-f]+ at step 2, one without an id"),
    ],
)
def test_elements_of_another_tensor_are_refused(world, source, error, message):
    """The index points to a whole chunk of the same shape: of the optimizer, or of another without a seal."""
    _, optimizer = trained(world, 2, "fused")
    path = Path(saved(world, optimizer, beside=torch.zeros(34)))
    other, loaded = trained(world, 3, "fused", seed=1)
    before = contents(other, loaded)

    def point_elsewhere():
        metadata = pickle.loads((path / ".metadata").read_bytes())
        storage = metadata.storage_data
        (chunk,) = [info for key, info in storage.items() if key.fqn == source]
        (place,) = [key for key in storage if key.fqn == "optimizer.state.first.bias.exp_avg"]
        storage[place] = chunk
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    on_rank_0(world, point_elsewhere)
    with pytest.raises(error, match=message):
        dcp.load({"optimizer": loaded}, checkpoint_id=path)
    assert contents(other, loaded) == before
