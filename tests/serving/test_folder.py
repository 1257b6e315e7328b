"""An export over an older one, which stays until the new one is written, also when the save fails."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases.serving import make_plain, read, train
from helpers import assert_bytes_equal

from zerofp4 import serving
from zerofp4.serving import files

SIZES = {1: 10**9, 2: 25_000, 3: 18_000}
"""Bytes of a shard, at most, by the number of shards that this gives."""

AMAX = "model.layers.0.self_attn.q_proj.weight_global_scale"

KEPT = ("tokenizer.json", "notes.txt")
"""What others have put into the folder."""


class Run:
    """A model in training whose exports differ."""

    def __init__(self):
        self.model = make_plain("Llama", num_hidden_layers=1)
        self.optimizer = train(self.model)

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.ones_like(p, dtype=p.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, shards: int = 1, format: str = "compressed-tensors") -> None:
        with mock.patch.object(files, "SHARD_BYTES", SIZES[shards]):
            serving.save_pretrained(self.model, folder, self.optimizer, format=format)


@pytest.fixture(scope="module")
def run():
    return Run()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_bytes_equal(found[key], value, key)


@pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_an_export_takes_the_place_of_an_older_one(run, tmp_path, old, new):
    for name in KEPT:
        (tmp_path / name).write_text(name)
    run.save(tmp_path, old)
    before, seen = read(tmp_path), []
    run.step()
    run.save(tmp_path / "other", new)
    after = read(tmp_path / "other")
    assert not before[AMAX].equal(after[AMAX])

    def add(export: files.Export, name: str, tensor: torch.Tensor, add=files.Export.add) -> None:
        add(export, name, tensor)
        check_same(read(tmp_path), before)
        seen.append(name)

    with mock.patch.object(files.Export, "add", add):
        run.save(tmp_path, new)
    check_same(read(tmp_path), after)
    assert set(seen) == after.keys()
    assert len(list(tmp_path.glob("*.safetensors"))) == new
    assert (tmp_path / "model.safetensors.index.json").exists() == (new > 1)
    assert {path.name for path in tmp_path.iterdir() if path.name in KEPT} == set(KEPT)
    assert not (tmp_path / ".export-draft").exists()


@pytest.mark.parametrize("old", [0, 2])
@pytest.mark.parametrize("interrupt", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [(files.Export, "add"), (Path, "write_text"), (Path, "mkdir")], ids=str)
def test_a_save_that_fails_leaves_all_as_it_was(run, tmp_path, old, interrupt, failing):
    folder = tmp_path / "served"
    if old:
        run.save(folder, old)
        run.step()
    before = contents(folder) if old else None
    with mock.patch.object(*failing, side_effect=interrupt("No space left on device")):
        with pytest.raises(interrupt):
            run.save(folder, 2, "modelopt")
    if before is None:
        assert not folder.exists()
    else:
        assert contents(folder) == before and not (folder / ".export-draft").exists()


def test_what_a_killed_save_has_left_goes_with_the_next(run, tmp_path):
    with mock.patch.object(files.Export, "end"), mock.patch.object(files.Export, "publish"):
        run.save(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == [".export-draft"]
    run.save(tmp_path)
    assert not (tmp_path / ".export-draft").exists() and len(list(tmp_path.glob("*.safetensors"))) == 1


def test_another_format_leaves_nothing_of_the_first(run, tmp_path):
    run.save(tmp_path, 1, "modelopt")
    assert (tmp_path / "hf_quant_config.json").exists()
    run.save(tmp_path, 1, "compressed-tensors")
    assert not (tmp_path / "hf_quant_config.json").exists()
    assert not any(key.endswith("weight_scale_2") for key in read(tmp_path))


def test_a_full_disk_is_an_error_before_anything_is_written(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"No space left in .*served: \d+ bytes are needed, 1000 are free"):
        run.save(tmp_path / "served")
    assert not list(tmp_path.iterdir())


def test_a_file_that_the_system_does_not_let_grow(run, tmp_path):
    run.save(tmp_path)
    before, (soft, hard) = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            run.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before


def test_a_file_in_the_way(run, tmp_path):
    (tmp_path / "served").write_text("mine")
    with pytest.raises(OSError):
        run.save(tmp_path / "served")
    assert (tmp_path / "served").read_text() == "mine"
