"""save_safetensors over an older export: readers find the old one or the new one, whole, at any time."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases.optim import make_net
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer, export

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = {1: 10**9, 3: 1200, 4: 1160}
"""Bytes of a shard, at most, by the number of shards that this gives."""

changes = pytest.mark.parametrize(("old", "new"), [(1, 1), (1, 3), (3, 1), (3, 3), (3, 4)])
"""Numbers of shards of the older and the newer export."""


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
        with mock.patch.object(export, "SHARD_BYTES", SIZES[shards]):
            zerofp4.save_safetensors(self.model, self.optimizer, folder, torch.float32)

    def values(self) -> dict[str, torch.Tensor]:
        found = dict(zerofp4.master_state_dict(self.model, self.optimizer))
        return {key: value.cpu() for key, value in found.items()}


@pytest.fixture
def trained(device):
    return Run(device)


def exports(folder: Path) -> list[tuple[set[str], dict[str, torch.Tensor]]]:
    """Files and values that each reader finds: who looks for the single file first, and who for the index."""
    found = []
    if (folder / SINGLE).exists():
        found.append(({SINGLE}, safetensors.load_file(folder / SINGLE)))
    if (folder / INDEX).exists():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        files = {name: safetensors.load_file(folder / name) for name in set(weight_map.values())}
        found.append(({INDEX, *files}, {key: files[name][key] for key, name in weight_map.items()}))
    return found


def check_whole(folder: Path, *expected: dict[str, torch.Tensor]) -> None:
    """Each reader finds one of these exports."""
    found = exports(folder)
    assert found, sorted(os.listdir(folder))
    for _, one in found:
        same = [one.keys() == e.keys() and all(torch.equal(one[key], e[key]) for key in e) for e in expected]
        assert any(same), sorted(os.listdir(folder))


def check_alone(folder: Path, shards: int, values: dict[str, torch.Tensor]) -> None:
    """The folder has this export and nothing else."""
    ((names, found),) = exports(folder)
    assert found.keys() == values.keys() and len(names) == shards + (shards > 1)
    for key, value in values.items():
        assert_bytes_equal(found[key], value, key)
    assert set(os.listdir(folder)) == names


@contextlib.contextmanager
def watched(call):
    """call(name) comes before each call of this thread that changes a folder or writes a file. (Other threads
    start ranks of other tests meanwhile.)
    """
    thread = threading.get_ident()

    def before(name, function):
        def replacement(*args, **kwargs):
            if threading.get_ident() == thread:
                call(name)
            return function(*args, **kwargs)

        return replacement

    names = [(os, "replace"), (os, "unlink"), (os, "fsync"), (Path, "unlink"), (Path, "write_text")]
    with contextlib.ExitStack() as stack:
        for owner, name in [*names, (safetensors, "save_file")]:
            stack.enter_context(mock.patch.object(owner, name, before(name, getattr(owner, name))))
        yield


@changes
@pytest.mark.parametrize("interrupt", [OSError, KeyboardInterrupt])
def test_an_export_is_whole_at_any_time_also_of_a_save_that_fails(trained, tmp_path, old, new, interrupt):
    """It fails at each of its calls. Before each there is the old export or the new one, whole, also for
    whoever is killed there; after a failure there is nothing else, and the next save is good.
    """
    failing_at, is_done = 0, False
    while not is_done:
        trained.save(tmp_path, old)
        before = trained.values()
        check_alone(tmp_path, old, before)
        trained.step()
        after, calls = trained.values(), []

        def fail(name: str, both=(before, after), calls=calls, at=failing_at) -> None:
            check_whole(tmp_path, *both)
            calls.append(name)
            if len(calls) - 1 == at:
                raise interrupt("no more")

        with watched(fail), contextlib.suppress(interrupt):
            trained.save(tmp_path, new)
            is_done = len(calls) <= failing_at
        check_whole(tmp_path, before, after)
        if "replace" not in calls[:failing_at]:
            check_alone(tmp_path, old, before)
        failing_at += 1
    assert calls.count("save_file") == new and calls.count("replace") == 1 and failing_at > 2 * new
    check_alone(tmp_path, new, after)


def test_what_a_killed_save_has_left_goes_with_the_next(trained, tmp_path):
    trained.save(tmp_path, 3)

    def fail(name: str) -> None:
        if name == "replace":
            raise OSError("no more")

    # Who is killed removes nothing.
    with watched(fail), mock.patch.object(Path, "unlink"), pytest.raises(OSError, match="no more"):
        trained.save(tmp_path, 4)
    assert len(os.listdir(tmp_path)) == 4 + 4 + 1
    trained.save(tmp_path, 4)
    check_alone(tmp_path, 4, trained.values())


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
