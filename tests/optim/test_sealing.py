"""Checksums of what an optimizer writes: what they see, who sees them, and who need not."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch

from zerofp4.optim import checksums
from zerofp4.optim.checksums import BLOCK, COLUMNS, begin_checksum, checksum
from zerofp4.optim.piece import Piece
from zerofp4.optim.sealing import (
    ATTRIBUTE,
    Chunk,
    DamagedFileError,
    SealedInt,
    SealedTuple,
)

SIZES = [1, BLOCK // 4 - 1, BLOCK // 4, 3 * BLOCK // 4 + 6 * COLUMNS + 3]
"""Of float32: less than a block, a block, several and a part of another."""


@pytest.mark.parametrize("numel", SIZES)
def test_every_kind_of_change_is_seen(numel, device):
    values = torch.randn(numel, device=device)
    found, draw = checksum(values, (numel,), 0), random.Random(numel)
    assert found == checksum(values.clone(), (numel,), 0) == checksum(values.cpu(), (numel,), 0)
    assert found != checksum(values, (numel,), 1) and found != checksum(values.view(torch.int32), (numel,), 0)
    data = values.view(torch.uint8)
    for _ in range(30):
        at = draw.randrange(data.numel())
        data[at] ^= 1 << draw.randrange(8)
        assert checksum(values, (numel,), 0) != found, f"byte {at}"
        values.copy_(torch.frombuffer(bytearray(data.cpu().numpy().tobytes()), dtype=torch.float32))
        found = checksum(values, (numel,), 0)
    for i, j in [(0, numel - 1), (0, min(2, numel - 1)), (0, min(2 * COLUMNS, numel - 1))]:
        if values[i] != values[j]:
            swapped = values.clone()
            swapped[i], swapped[j] = values[j], values[i]
            assert checksum(swapped, (numel,), 0) != found, (i, j)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_any_dtype_layout_and_place_in_memory(dtype):
    base = torch.randn(40, 33).mul(9).to(dtype)
    for view in (base, base.t(), base[1:, 1:], base.view(-1)[3:], base[0, 0], base[:0]):
        assert checksum(view) == checksum(view.contiguous().clone())


def test_a_gpu_takes_as_many_blocks_at_a_time_as_it_likes(device, monkeypatch):
    base = torch.randn(5 * BLOCK // 4 + 7, device=device)
    monkeypatch.setattr(checksums, "GPU_BLOCKS", 2)
    for values in (base, base[1:], base[: 4 * BLOCK // 4]):  # from 4 bytes on words are not aligned
        later = begin_checksum(values, "w")
        assert later() == checksum(values.cpu(), "w") == later()


def written(values, label="a.master", shape=(4, 6), start=3) -> io.BytesIO:
    """As torch.distributed.checkpoint writes it."""
    file = io.BytesIO()
    torch.save(Chunk.of(values, label, shape, start).detach().cpu().clone(), file)
    file.seek(0)
    return file


def test_a_file_is_of_plain_tensors():
    values = torch.arange(12.0)
    found = torch.load(written(values), weights_only=True)
    assert type(found) is torch.Tensor and torch.equal(found, values)
    assert getattr(found, ATTRIBUTE)[:3] == ("a.master", (4, 6), 3)


def read(file, target, offset=0, first=0, length=12):
    """As torch.distributed.checkpoint reads a part of it."""
    target.detach().narrow(0, first, length).copy_(torch.load(file).narrow(0, offset, length))


def test_what_is_read_is_looked_at(device):
    values, here = torch.arange(12.0, device=device), torch.zeros(20, device=device)
    read(written(values), Chunk.into(here[2:14], "a.master", (4, 6), 3))
    assert torch.equal(here[2:14], values) and here.sum() == values.sum()
    halves = torch.zeros(12, dtype=torch.bfloat16, device=device)
    read(written(values), Chunk.into(halves, "a.master", (4, 6), 3))
    assert torch.equal(halves, values.bfloat16())
    read(written(values), Chunk.into(here[2:14], "a.master", (4, 6), 5), offset=4, first=2, length=3)
    read(written(values), Chunk.into(here[:12], None, (4, 6), 3))
    plain = io.BytesIO()
    torch.save(values, plain)
    plain.seek(0)
    read(plain, Chunk.into(here[:12], "a.master", (4, 6), 9))  # another optimizer's


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            ("b.master", (4, 6), 3),
            r"elements of a.master of shape \(4, 6\) from 3 on are in the file where those",
        ),
        (("a.master", (6, 4), 3), r"those of a.master of shape \(6, 4\) from 3 on should be: it is damaged"),
        (("a.master", (4, 6), 4), "from 3 on are in the file where those of a.master of shape"),
    ],
)
def test_what_lies_in_the_wrong_place_is_found(place, message):
    here = torch.zeros(12)
    with pytest.raises(DamagedFileError, match=message):
        read(written(torch.arange(12.0)), Chunk.into(here, *place))
    assert not here.any()


def test_other_elements_are_found(device):
    content = bytearray(written(torch.arange(12.0)).getvalue())
    at = content.index(torch.arange(12.0).numpy().tobytes())
    content[at + 13] ^= 1
    received = []
    for part in ({}, {"length": 5}):
        here = torch.zeros(12, device=device)
        with pytest.raises(DamagedFileError, match=r"elements of a.master are not those that were saved"):
            read(io.BytesIO(content), Chunk.into(here, "a.master", (4, 6), 3, received), **part)
        assert not received and not here.any()


def test_other_elements_of_a_large_chunk_are_found(device):
    """At which a GPU looks, once it is there."""
    count, received = BLOCK // 4 + 2, []
    shape, values = (2, count), torch.arange(float(count))
    content = bytearray(written(values, shape=shape).getvalue())
    here = torch.zeros(count, device=device)
    read(io.BytesIO(content), Chunk.into(here, "a.master", shape, 3, received), length=count)
    assert torch.equal(here.cpu(), values) and len(received) == 1
    content[content.index(values.numpy().tobytes()) + BLOCK // 2] ^= 1
    with pytest.raises(DamagedFileError, match=r"elements of a.master are not those that were saved"):
        read(io.BytesIO(content), Chunk.into(here, "a.master", shape, 3, received), length=count)
    assert len(received) == 1


def test_pieces_of_a_pickle():
    file = io.BytesIO()
    torch.save(Piece(torch.arange(12.0), (4, 6), 3), file)
    content = bytearray(file.getvalue())
    content[content.index(torch.arange(12.0).numpy().tobytes()) + 13] ^= 1
    with pytest.raises(DamagedFileError, match="the file is damaged"):
        torch.load(io.BytesIO(content))


GROUPS = ({"lr": 0.125, "betas": (0.5, 0.25), "names": ["a"], "fused": None, "t": torch.ones(2)}, {"lr": 1})


@pytest.mark.parametrize("value", [SealedTuple(GROUPS), SealedInt(517)])
def test_options_and_steps(value):
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(same) is type(value) and repr(same) == repr(value)
    content = bytearray(pickle.dumps(value))
    raw = torch.tensor(0.125, dtype=torch.float64).numpy().tobytes()[::-1]  # as pickle has it
    at = content.index(raw if isinstance(value, tuple) else (517).to_bytes(2, "little")) + 1
    content[at] ^= 4
    with pytest.raises(DamagedFileError, match="options or steps are not those"):
        pickle.loads(bytes(content))


def test_a_chunk_on_a_cpu_is_no_part_of_a_larger_storage():
    """torch would clone it, and keep the clone until the file ends."""
    values = torch.arange(24, dtype=torch.bfloat16)
    chunk = Chunk.of(values[8:20].view(3, 4), "w", (6, 4), 8)
    assert chunk.data_ptr() == values[8:].data_ptr()
    assert chunk.untyped_storage().nbytes() == chunk.nbytes == 24
    values[8] = -1
    assert chunk[0, 0] == -1


def test_a_copy_from_a_gpu_gives_its_memory_away_when_it_is_written():
    values = torch.arange(12, dtype=torch.float32)
    chunk = Chunk.of(values, "w", (12,), 0).clone()
    chunk.place = chunk.place._replace(checksum=begin_checksum(values, "w", (12,), 0))  # as a GPU takes it
    file = io.BytesIO()
    torch.save(chunk, file)
    assert chunk.untyped_storage().nbytes() == 0
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert torch.equal(read, values)
    with pytest.raises(RuntimeError, match="w was written already"):
        torch.save(chunk, io.BytesIO())
