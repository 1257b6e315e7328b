"""Pieces: tensors of which a rank holds a flat range; and the ids of saves, which they keep in files."""

from __future__ import annotations

import copy
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.optim import through_a_file
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.optim.piece import Piece, SavedOptions


def make_piece(first=3, last=17):
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    return Piece(whole.view(-1)[first:last], whole.shape, first), whole


def test_copies_are_pieces_with_values_of_their_own():
    piece, whole = make_piece()
    copies = [copy.deepcopy(piece), piece.clone(), piece.to("cpu", copy=True), piece.detach()]
    for moved in (piece.to("meta"), piece.to(device="meta"), piece.to("meta", torch.float64)):
        assert type(moved) is Piece and moved.device.type == "meta" and moved.shard == (3, 14)
    assert piece.to("cpu").values.data_ptr() == piece.values.data_ptr()
    for one in (*copies, through_a_file(piece)):
        assert isinstance(one, Piece) and one.shape == (4, 6) and one.shard == (3, 14)
        assert torch.equal(one.values, whole.view(-1)[3:17])
    assert piece.new_empty((4, 6), device="cpu").shard == piece.shard


def test_operations_need_the_whole_tensor_and_what_is_copied_in_leaves_the_values_alone():
    piece, whole = make_piece()
    with pytest.raises(RuntimeError, match=r"shape \(4, 6\) this rank holds 14 elements: full_tensor\(\)"):
        piece + 1
    assert torch.equal(make_piece(0, 24)[0] + 1, whole + 1)
    assert repr(piece).endswith("elements 3..16 of it here)")
    piece.copy_(-whole)
    assert whole.view(-1)[3] == 3 and piece.values[0] == -3 and not piece.unread


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_has_chunks_of_a_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr("zerofp4.optim.piece.CHUNK", 4 * 12)  # two rows

    def chunks(path):
        found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["w"].chunks
        return [(*chunk.offsets, *chunk.sizes) for chunk in found]

    piece, whole = make_piece(0, 24)
    dcp.save({"w": piece}, checkpoint_id=tmp_path, no_dist=True)
    assert chunks(tmp_path) == [(0, 0, 2, 6), (2, 0, 2, 6)]
    part, _ = make_piece(3, 17)
    for one, expected in ((piece, whole.view(-1)), (part, whole.view(-1)[3:17])):
        one.values = torch.zeros(expected.shape)
        dcp.load({"w": one}, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(one.values, expected) and not one.unread
    dcp.save({"w": part}, checkpoint_id=tmp_path / "part", no_dist=True)  # asked for otherwise than by a load
    assert chunks(tmp_path / "part") == [(0, 3, 1, 3), (1, 0, 1, 6), (2, 0, 1, 5)]


def test_elements_that_no_file_had_are_noticed():
    """As torch.distributed.checkpoint reads: a box, or a part of it that a file has."""
    piece, _ = make_piece()
    for i, chunk in enumerate(piece.__create_chunk_list__()):
        box = piece.__get_tensor_shard__(type("Index", (), {"offset": chunk.offsets})).detach()
        assert box.shape == chunk.sizes
        box.fill_(9.0)  # is no reading
        width = box.shape[1] - 1
        for part in (box.narrow(1, 0, width), box.narrow(1, width, 1)):
            assert piece.unread
            part.copy_(torch.full(part.shape, float("nan") if i else 0.0))
    assert not piece.unread
    assert piece.values[:3].tolist() == [0, 0, 0] and piece.values[3:].isnan().all()
    box.narrow(1, 0, 1).copy_(torch.zeros(1, 1))
    assert piece.unread  # a file whose boxes overlap has others that it lacks


# The ids of saves


def test_options_know_their_save():
    value = SavedOptions(({"lr": 0.125, "betas": (0.5, 0.25), "t": torch.ones(2)}, {"lr": 1}))
    value.save_id = "token-000000000001"
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(same) is SavedOptions and repr(same) == repr(value) and same.save_id == value.save_id


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_with_checksums_load(tmp_path):
    """Two ranks wrote them after 3 steps: a folder by dcp.save, and what torch.save wrote on each rank."""
    zipfile.ZipFile(Path(__file__).parents[1] / "data" / "sealed_checkpoint.zip").extractall(tmp_path)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    model = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=1.0)
    dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded, (group,) = optimizer.state_dict(), optimizer.param_groups
    assert (loaded["steps"], group["lr"], group["betas"]) == (3, 0.125, (0.5, 0.75))
    parts = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    (save_id,) = {part["param_groups"].save_id for part in parts}
    assert save_id == "d0cc9c046a78a674-000000000003"
    for number, entries in loaded["state"].items():
        for name, piece in entries.items():
            assert_bytes_equal(piece.full_tensor(), expected[str(number)][name], f"{number}.{name}")
            whole = torch.zeros(piece.numel())
            for part in (part["state"][number][name] for part in parts):
                whole[part.start : part.shard.end] = part.values
                assert part.saves == {save_id}
            assert_bytes_equal(whole.view(piece.shape), expected[str(number)][name], f"{number}.{name} again")
