"""save_safetensors without an optimizer, and over other files. (Over an older export: test_folder.)"""

from __future__ import annotations

import json
import os
import sys
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
SIZES = {1: 10**9, 3: 1200}
"""Bytes of a shard, at most, by the number of shards that this gives."""


class Run:
    """A model in training, and the values that its exports have."""

    def __init__(self, device):
        self.model = make_net(device)
        self.optimizer = ZeroFP4Optimizer(self.model.named_parameters(), FusedAdamW, lr=0.1)

    def save(self, folder: Path, shards: int) -> None:
        with mock.patch.object(files, "SHARD_BYTES", SIZES[shards]):
            zerofp4.save_safetensors(self.model, folder, self.optimizer, torch.float32)

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


def test_without_an_optimizer(device, tmp_path):
    """The value from before the conversion. The optimizer that trains a weight may not be left out."""
    model, expected = make_net(device), {}
    for key, p in model.named_parameters():
        before = p.get_high_precision_init_val() if isinstance(p, zerofp4.NVFP4Tensor) else None
        expected[key] = (p.detach() if before is None else before).float().cpu()
    zerofp4.save_safetensors(model, tmp_path, dtype=torch.float32)
    check_alone(tmp_path, 1, expected)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW)
    with pytest.raises(RuntimeError, match=r"first\.weight is held by a ZeroFP4Optimizer: pass it"):
        zerofp4.save_safetensors(model, tmp_path)
    del optimizer


def test_without_the_extra(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError, match=r"exports need the extra `serving` \(pip install zerofp4\[serving\]\)"
    ):
        trained.save(tmp_path / "export", 1)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_links_are_replaced_and_not_followed_and_other_files_stay(trained, tmp_path, shards):
    names = [SINGLE, INDEX, *(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))]
    others = ["config.json", "adapter_model.safetensors", "a-00001-of-00002.safetensors", "model.bin"]
    folder, elsewhere = tmp_path / "export", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    for name in names:
        (elsewhere / name).write_text(name)
        (folder / name).symlink_to(elsewhere / name)
    for name in others:
        (folder / name).write_text(name)
    trained.save(folder, shards)
    for name in others:
        assert (folder / name).read_text() == name
        (folder / name).unlink()
    check_alone(folder, shards, trained.values())
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {n: n for n in names}
