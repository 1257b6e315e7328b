"""Seals of what an optimizer writes: which changes they find, and what a file holds."""

from __future__ import annotations

import copy
import io
import pickle
import random
from types import SimpleNamespace

import pytest
import torch

from zerofp4.optim.piece import About, Piece
from zerofp4.optim.seal import ATTRIBUTE, BLOCK, COLUMNS, SealedTuple, checksum

SAVE = "token-000000000001"
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
    turned = values.expand(2, numel).t()
    assert checksum(turned) == checksum(turned.contiguous()) != checksum(turned[1:])


def rows(first, values=None, label="a.master", shape=(4, 6), device="cpu"):
    """A piece of two rows."""
    values = torch.zeros(12, device=device) if values is None else values
    return Piece(values, shape, first * shape[1], About(label), {SAVE: "a tensor"})


def written(values) -> io.BytesIO:
    """Rows 1 and 2 as torch.distributed.checkpoint writes them: twice, as a writer does that retries."""
    piece = rows(1, values)
    (item,) = piece.__create_write_items__("a", None)
    chunk, files = piece.__get_tensor_shard__(item.index).detach(), [io.BytesIO(), io.BytesIO()]
    # A part of a larger storage torch would clone, and keep the clone until the file ends.
    assert chunk.data_ptr() == values.data_ptr() and chunk.untyped_storage().nbytes() == values.nbytes
    chunk = chunk.cpu()
    for file in files:
        torch.save(chunk, file)
    assert files[0].getvalue() == files[1].getvalue()
    return io.BytesIO(files[0].getvalue())


def read(file, piece, source=slice(0, 2), target=slice(0, 2)):
    """As torch.distributed.checkpoint reads rows of a file into rows of a piece."""
    (chunk,) = piece.__create_chunk_list__()
    box = piece.__get_tensor_shard__(SimpleNamespace(offset=chunk.offsets)).detach()
    found = torch.load(file, weights_only=True).narrow(0, source.start, source.stop - source.start)
    box.narrow(0, target.start, target.stop - target.start).copy_(found)


def test_a_file_is_of_plain_tensors_and_what_is_read_is_checked(device):
    values = torch.arange(-6.0, 18.0, device=device)[6:18]
    found = torch.load(written(values), weights_only=True)
    assert type(found) is torch.Tensor and torch.equal(found, values.cpu().view(2, 6))
    assert getattr(found, ATTRIBUTE)[:4] == ("a.master", 6, (4, 6), SAVE)
    for piece in (rows(1, device=device), rows(1, device=device, label=None)):
        read(written(values), piece)
        assert torch.equal(piece.present(), values) and list(piece.saves) == [SAVE]
    half = rows(1, torch.zeros(12, dtype=torch.bfloat16, device=device))
    read(written(values), half)
    assert torch.equal(half.present(), values.bfloat16())
    read(written(values), below := rows(2, device=device), slice(1, 2), slice(0, 1))
    assert torch.equal(below.present()[:6], values[6:]) and below.unread
    plain = io.BytesIO()
    torch.save(values.cpu().view(2, 6), plain)
    plain.seek(0)
    read(plain, foreign := rows(0, device=device))  # another optimizer's
    assert list(foreign.saves) == [None]


GROUPS = ({"lr": 0.125, "betas": (0.5, 0.25), "names": ["a"], "fused": None, "t": torch.ones(2)}, {"lr": 1})


def test_a_flipped_bit_in_options_is_found():
    value = SealedTuple(GROUPS, SAVE)
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(same) is SealedTuple and repr(same) == repr(value) and same.save_id == SAVE
    number = torch.tensor(0.125, dtype=torch.float64).numpy().tobytes()[::-1]  # as pickle has it
    for raw in (number, b"token-0"):
        content = bytearray(pickle.dumps(value))
        content[content.index(raw) + 1] ^= 4
        with pytest.raises(ValueError, match="options are not those"):
            pickle.loads(bytes(content))
