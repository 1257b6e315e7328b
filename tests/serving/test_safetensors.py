"""save_safetensors over an older export. That readers find one of the two at any time: tests of folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases.optim import make_net
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.serving import files

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = {1: 10**9, 3: 1200, 4: 1160}
"""Bytes of a shard, at most, by the number of shards that this gives."""


class Run:
    """A model in training, and the values that its exports have."""

    def __init__(self, device):
        self.model = make_net(device)
        self.optimizer = ZeroFP4Optimizer(self.model.named_parameters(), FusedAdamW, lr=0.1)

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones(p.shape, device=p.device).to(p.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, shards: int) -> None:
        with mock.patch.object(files, "SHARD_BYTES", SIZES[shards]):
            zerofp4.save_safetensors(self.model, self.optimizer, folder, torch.float32)

    def values(self) -> dict[str, torch.Tensor]:
        found = dict(zerofp4.master_state_dict(self.model, self.optimizer))
        return {key: value.cpu() for key, value in found.items()}


@pytest.fixture
def trained(device):
    return Run(device)


def check_alone(folder: Path, shards: int, values: dict[str, torch.Tensor]) -> None:
    """The folder has this export and nothing else."""
    weight_map = dict.fromkeys(values, SINGLE)
    if shards > 1:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    names = set(weight_map.values())
    assert weight_map.keys() == values.keys() and len(names) == shards
    found = {name: safetensors.load_file(folder / name) for name in names}
    assert sum(map(len, found.values())) == len(values)
    for key, value in values.items():
        assert_bytes_equal(found[weight_map[key]][key], value, key)
    assert set(os.listdir(folder)) == names | ({INDEX} if shards > 1 else set())


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 3), (3, 1), (3, 3), (3, 4)])
def test_the_older_export_is_gone(trained, tmp_path, old, new):
    trained.save(tmp_path, old)
    check_alone(tmp_path, old, trained.values())
    trained.step()
    trained.save(tmp_path, new)
    check_alone(tmp_path, new, trained.values())


@pytest.mark.parametrize("shards", [1, 3])
def test_what_a_killed_save_has_left_goes_with_the_next(trained, tmp_path, shards):
    trained.save(tmp_path, 3)
    before = trained.values()
    trained.step()

    def replace(source: Path, target: Path, replace=os.replace) -> None:
        if target.name in (SINGLE, INDEX):
            raise OSError("no more")
        replace(source, target)

    # Who is killed removes nothing.
    with (
        mock.patch.object(os, "replace", replace),
        mock.patch.object(Path, "unlink"),
        mock.patch.object(files.Export, "end"),
        pytest.raises(OSError, match="no more"),
    ):
        trained.save(tmp_path, shards)
    assert (tmp_path / ".export-draft").exists()
    names = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
    found = {key: value for name in names for key, value in safetensors.load_file(tmp_path / name).items()}
    for key, value in before.items():
        assert_bytes_equal(found[key], value, key)
    trained.save(tmp_path, 4)
    check_alone(tmp_path, 4, trained.values())


@pytest.mark.parametrize("kind", ["link", "broken link", "file"])
def test_what_lies_in_the_way_of_the_draft_is_removed(trained, tmp_path, kind):
    folder, elsewhere = tmp_path / "export", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    draft = folder / ".export-draft"
    if kind == "file":
        draft.write_text("")
    else:
        draft.symlink_to(elsewhere if kind == "link" else tmp_path / "not there")
    trained.save(folder, 3)
    check_alone(folder, 3, trained.values())
    assert (elsewhere / "kept").read_text() == "kept"


def test_a_name_that_safetensors_keeps_for_itself(trained, tmp_path):
    trained.model.register_parameter("__metadata__", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    with pytest.raises(ValueError, match="a tensor is called __metadata__"):
        trained.save(tmp_path / "export", 1)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_links_are_replaced_and_not_followed_and_other_files_stay(trained, tmp_path, shards):
    names = [SINGLE, INDEX, *(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))]
    others = ["config.json", "adapter_model.safetensors", "a-00001-of-00002.safetensors", "model.bin"]
    folder, elsewhere = tmp_path / "export", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    for name in names[:-1]:
        (elsewhere / name).write_text(name)
        (folder / name).symlink_to(elsewhere / name)
    (folder / names[-1]).symlink_to(elsewhere / "not there")
    for name in others:
        (folder / name).write_text(name)
    (folder / "model-00001-of-00009.safetensors").mkdir()
    trained.save(folder, shards)
    for name in others:
        assert (folder / name).read_text() == name
        (folder / name).unlink()
    (folder / "model-00001-of-00009.safetensors").rmdir()
    check_alone(folder, shards, trained.values())
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {n: n for n in names[:-1]}
