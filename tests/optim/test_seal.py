"""Seals of what an optimizer writes: which changes they find, and what a file holds."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch

from zerofp4.optim.piece import Piece
from zerofp4.optim.seal import ATTRIBUTE, BLOCK, COLUMNS, Chunk, Place, checksum, sealed

SIZES = [1, BLOCK // 4 - 1, BLOCK // 4, 3 * BLOCK // 4 + 6 * COLUMNS + 3]
"""Of float32: less than a block, a block, several and a part of another."""


@pytest.mark.parametrize("numel", SIZES)
def test_every_kind_of_change_is_found(numel, device):
    values = torch.randn(numel, device=device)
    found, draw = checksum(values, (numel,), 0), random.Random(numel)
    assert found == checksum(values.clone(), (numel,), 0) == checksum(values.cpu(), (numel,), 0)
    assert found != checksum(values, (numel,), 1) and found != checksum(values.view(torch.int32), (numel,), 0)
    data = values.cpu().view(torch.uint8)
    for _ in range(30):
        at, bit = draw.randrange(data.numel()), 1 << draw.randrange(8)
        data[at] ^= bit
        assert checksum(data.view(torch.float32), (numel,), 0) != found, f"byte {at}"
        data[at] ^= bit
    for i, j in [(0, numel - 1), (0, min(2, numel - 1)), (0, min(2 * COLUMNS, numel - 1))]:
        if values[i] != values[j]:
            swapped = values.clone()
            swapped[i], swapped[j] = values[j], values[i]
            assert checksum(swapped, (numel,), 0) != found, (i, j)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_is_of_elements_in_any_layout(dtype):
    base = torch.randn(40, 33).mul(9).to(dtype)
    for view in (base, base.t(), base[1:, 1:], base.view(-1)[3:], base[0, 0], base[:0]):
        assert checksum(view) == checksum(view.contiguous().clone())


def chunk(values, label="a.master", start=3, shape=(4, 6), save_id="token-000000000001"):
    return Chunk.of(values, Place(label, start, shape, {save_id: "a"}, {}))


def written(values, *place) -> io.BytesIO:
    """As torch.distributed.checkpoint writes it."""
    file = io.BytesIO()
    torch.save(chunk(values, *place).detach().cpu().clone(), file)
    file.seek(0)
    return file


def read(file, target, offset=0, first=0, length=12):
    """As torch.distributed.checkpoint reads a part of it."""
    target.detach().narrow(0, first, length).copy_(torch.load(file).narrow(0, offset, length))


def test_a_file_is_of_plain_tensors_and_can_be_written_again(device):
    values = torch.arange(12.0, device=device)
    own, files = chunk(values).detach().cpu(), []
    for _ in range(2):  # as a writer does that retries
        files.append(io.BytesIO())
        torch.save(own, files[-1])
    assert files[0].getvalue() == files[1].getvalue()
    found = torch.load(io.BytesIO(files[1].getvalue()), weights_only=True)
    assert type(found) is torch.Tensor and torch.equal(found, values.cpu())
    assert getattr(found, ATTRIBUTE)[:4] == ("a.master", 3, (4, 6), "token-000000000001")


def test_what_is_read_is_checked(device):
    values, here = torch.arange(12.0, device=device), torch.zeros(20, device=device)
    read(written(values), whole := chunk(here[2:14]))
    assert torch.equal(here[2:14], values) and here.sum() == values.sum()
    assert whole.place.received == {(3, (12,)): "token-000000000001"}
    read(written(values), chunk(halves := torch.zeros(12, dtype=torch.bfloat16, device=device)))
    assert torch.equal(halves, values.bfloat16())
    read(written(values), chunk(here[2:14], "a.master", 5), offset=4, first=2, length=3)
    read(written(values), chunk(here[:12], None))
    plain = io.BytesIO()
    torch.save(values.cpu(), plain)
    plain.seek(0)
    read(plain, foreign := chunk(here[:12], "a.master", 9))  # another optimizer's
    assert foreign.place.received == {(9, (12,)): None}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("b.master",), r"elements of a.master of shape \(4, 6\) from 3 on are in the file where those"),
        (("a.master", 3, (6, 4)), r"those of a.master of shape \(6, 4\) from 3 on should be: it is damaged"),
        (("a.master", 4), "from 3 on are in the file where those of a.master of shape"),
    ],
)
def test_a_chunk_in_the_wrong_place_is_found(place, message):
    here = torch.zeros(12)
    with pytest.raises(ValueError, match=message):
        read(written(torch.arange(12.0)), chunk(here, *place))
    assert not here.any()


@pytest.mark.parametrize("part", [{}, {"length": 5}])
@pytest.mark.parametrize("what", ["elements", "save id"])
def test_a_flipped_bit_is_found(device, what, part):
    content = bytearray(written(torch.arange(12.0)).getvalue())
    raw = torch.arange(12.0).numpy().tobytes() if what == "elements" else b"token-000000000001"
    content[content.index(raw) + 13] ^= 1
    here = torch.zeros(12, device=device)
    with pytest.raises(ValueError, match=r"elements of a.master are not those that were saved"):
        read(io.BytesIO(content), target := chunk(here), **part)
    assert not target.place.received and not here.any()


def test_a_flipped_bit_in_a_pickled_piece_is_found():
    file = io.BytesIO()
    torch.save(Piece(torch.arange(12.0), (4, 6), 3), file)
    content = bytearray(file.getvalue())
    content[content.index(torch.arange(12.0).numpy().tobytes()) + 13] ^= 1
    with pytest.raises(ValueError, match="the file is damaged"):
        torch.load(io.BytesIO(content))


GROUPS = ({"lr": 0.125, "betas": (0.5, 0.25), "names": ["a"], "fused": None, "t": torch.ones(2)}, {"lr": 1})


@pytest.mark.parametrize("value", [GROUPS, 517])
def test_a_flipped_bit_in_options_and_steps_is_found(value):
    value = sealed(value, "token-000000000001")
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(same) is type(value) and repr(same) == repr(value) and same.save_id == value.save_id
    number = torch.tensor(0.125, dtype=torch.float64).numpy().tobytes()[::-1]  # as pickle has it
    for raw in (number if isinstance(value, tuple) else (517).to_bytes(2, "little"), b"token-0"):
        content = bytearray(pickle.dumps(value))
        content[content.index(raw) + 1] ^= 4
        with pytest.raises(ValueError, match="options or steps are not those"):
            pickle.loads(bytes(content))


def test_a_chunk_on_a_cpu_is_no_part_of_a_larger_storage():
    """torch would clone it, and keep the clone until the file ends."""
    values = torch.arange(24, dtype=torch.bfloat16)
    own = chunk(values[8:20].view(3, 4), "w", 8, (6, 4))
    assert own.data_ptr() == values[8:].data_ptr()
    assert own.untyped_storage().nbytes() == own.nbytes == 24
    values[8] = -1
    assert own[0, 0] == -1
