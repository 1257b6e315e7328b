"""Pieces: tensors of which a rank holds a flat range."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp

from zerofp4.optim.piece import Piece


def make_piece(first=3, last=17):
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    return Piece(whole.view(-1)[first:last], whole.shape, first), whole


def test_copies_are_pieces_with_values_of_their_own():
    piece, whole = make_piece()
    file = io.BytesIO()
    torch.save({"a": piece}, file)
    file.seek(0)
    copies = [copy.deepcopy(piece), piece.clone(), piece.to("cpu", copy=True), piece.detach()]
    for one in (*copies, torch.load(file, weights_only=True)["a"]):
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
    assert piece.values[0] == 3 and piece.present()[0] == -3 and not piece.unread


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_has_chunks_of_a_limited_size_and_each_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("zerofp4.optim.piece.CHUNK", 4 * 12)  # two rows
    asked = []

    class Reader(dcp.FileSystemReader):
        def read_data(self, plan, planner):
            asked.extend(tuple(item.storage_offsets) + tuple(item.lengths) for item in plan.items)
            return super().read_data(plan, planner)

    def chunks(path):
        found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["w"].chunks
        return [(*chunk.offsets, *chunk.sizes) for chunk in found]

    piece, whole = make_piece(0, 24)
    dcp.save({"w": piece}, checkpoint_id=tmp_path, no_dist=True)
    assert chunks(tmp_path) == [(0, 0, 2, 6), (2, 0, 2, 6)]
    part, _ = make_piece(3, 17)
    for one, expected in ((piece, whole.view(-1)), (part, whole.view(-1)[3:17])):
        one.values = torch.zeros(expected.shape)
        dcp.load({"w": one}, storage_reader=Reader(tmp_path), no_dist=True)
        assert torch.equal(one.present(), expected) and not one.unread
    assert asked[:2] == [(0, 0, 2, 6)] * 2 and len(asked) == 5
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
    assert piece.present()[:3].tolist() == [0, 0, 0] and piece.present()[3:].isnan().all()
    box.narrow(1, 0, 1).copy_(torch.zeros(1, 1))
    assert piece.unread  # a file whose boxes overlap has others that it lacks
