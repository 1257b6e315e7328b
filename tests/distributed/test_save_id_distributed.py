"""A folder with chunks of two saves is refused, whoever left it so; every good checkpoint loads."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optim_cases import assert_all_equal
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from distributed.cases import shared_folder
from distributed.checkpoint_cases import assert_same_model, build, make_model, run
from distributed.checks_optim import model_bytes
from distributed.run import RanksFailed, on_ranks, run_ranks
from zerofp4.optim.seal import ATTRIBUTE


def trained(world, steps, seed=0, group=None):
    model = make_model(world, seed)
    optimizer = build(model, "fused", group)
    run(model, optimizer, range(steps))
    return model, optimizer


def save(optimizer, path, thread_count=1, group=None) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=thread_count)
    dcp.save({"optimizer": optimizer}, storage_writer=writer, process_group=group)


def load(optimizer, path, group=None) -> None:
    dcp.load({"optimizer": optimizer}, checkpoint_id=path, process_group=group)


def contents(model, optimizer) -> list:
    """All that a load may change."""
    state = optimizer.state_dict()
    values = [piece.values for entries in state["state"].values() for piece in entries.values()]
    tensors = [*values, *model_bytes(list(model.parameters()))]
    options = repr([dict(group) for group in state["param_groups"]])
    return [int(state["steps"]), options, *(t.detach().cpu().numpy().tobytes() for t in tensors)]


def refused(model, optimizer, source: Path | dict, match: str, group=None) -> None:
    """On every rank, with one message, and nothing changes. source: a checkpoint or a state dict."""
    before = contents(model, optimizer)
    with pytest.raises(ValueError, match=match) as caught:
        if isinstance(source, dict):
            optimizer.load_state_dict(source)
        else:
            load(optimizer, source, group)
    messages: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, str(caught.value), group=group)
    assert len(set(messages)) == 1, messages
    assert contents(model, optimizer) == before


def of_steps(one: int, other: int) -> str:
    """In either order."""
    saves = [rf"\S+ of save [0-9a-f]+ at step {step}" for step in (one, other)]
    return rf"mixes 2 saves: it has ({saves[0]} and {saves[1]}|{saves[1]} and {saves[0]})\."


def on_rank_0(world, function: Callable, *arguments) -> None:
    dist.barrier()
    if world.rank == 0:
        function(*arguments)
    dist.barrier()


def copy_files(source: Path, target: Path, pattern: str) -> None:
    """As if the rank of these files alone had ended its part of a save into the other folder."""
    files = list(source.glob(pattern))
    assert files
    for file in files:
        shutil.copy(file, target / file.name)


@on_ranks(2)
@pytest.mark.parametrize(
    ("written", "thread_count"), [("__0_*", 1), ("__1_*", 1), ("__*_*", 2), ("__0_1*", 2)]
)
def test_a_save_that_did_not_end_in_an_old_folder_is_refused(world, written, thread_count):
    """Also where one rank has written one of its files; where all have, it is the new save."""
    old, new = shared_folder(world), shared_folder(world)
    model, optimizer = trained(world, 1)
    save(optimizer, old, thread_count)
    run(model, optimizer, range(1, 5))
    save(optimizer, new, thread_count)
    on_rank_0(world, copy_files, new, old, f"{written}.distcp")
    other, loaded = trained(world, 2, seed=1)
    if written == "__*_*":
        load(loaded, old)
        assert loaded.state_dict()["steps"] == 5
    else:
        refused(other, loaded, old, of_steps(1, 5))
        load(loaded, new)
    assert_same_model(other, model)


class Failing(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError("No space left on device")


@on_ranks(2)
def test_a_save_of_which_one_rank_cannot_write_is_refused(world):
    path = shared_folder(world)
    model, optimizer = trained(world, 1)
    save(optimizer, path)
    run(model, optimizer, range(1, 5))
    writer = (Failing if world.rank else dcp.FileSystemWriter)(path)
    with pytest.raises(dcp.CheckpointException, match="No space left"):
        dcp.save({"optimizer": optimizer}, storage_writer=writer)
    refused(model, optimizer, path, of_steps(1, 5))
    run(model, optimizer, range(5, 6))
    save(optimizer, path)
    other, loaded = trained(world, 2, seed=1)
    load(loaded, path)
    assert_same_model(other, model)


class Dying(dcp.FileSystemWriter):
    """Rank 1 is killed before it writes, and after rank 0 has written."""

    def write_data(self, plan, planner):
        done = self.path / "rank 0 is done"
        if dist.get_rank() == 0:
            result = super().write_data(plan, planner)
            result.wait()
            done.touch()
            return result
        while not done.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(world, path: str) -> None:
    model, optimizer = trained(world, 1)
    save(optimizer, path)
    run(model, optimizer, range(1, 5))
    dcp.save({"optimizer": optimizer}, storage_writer=Dying(path))


def load_what_is_left(world, path: str) -> None:
    refused(*trained(world, 2, seed=1), Path(path), of_steps(1, 5))


def test_a_rank_that_is_killed_before_it_writes(tmp_path):
    with pytest.raises(RanksFailed):
        run_ranks(save_and_die, 2, path=str(tmp_path))
    assert (tmp_path / "rank 0 is done").exists()
    run_ranks(load_what_is_left, 2, path=str(tmp_path))


@on_ranks(2)
@pytest.mark.parametrize("again", ["trained", "resumed"])
def test_two_runs_at_one_step_are_two(world, again):
    one, other = shared_folder(world), shared_folder(world)
    model, optimizer = trained(world, 2)
    save(optimizer, one)
    if again == "trained":
        model, optimizer = trained(world, 2, seed=1)
    else:
        load(optimizer, one)
    save(optimizer, other)
    on_rank_0(world, copy_files, other, one, "__1_*")
    refused(model, optimizer, one, of_steps(2, 2))
    load(optimizer, other)


@on_ranks(3)
def test_a_mixture_is_refused_in_a_world_of_any_size_and_a_good_one_loads(world):
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    good, mixed = shared_folder(world), shared_folder(world)
    if world.rank < 2:
        model, optimizer = trained(world, 1, group=groups[2])
        save(optimizer, mixed, group=groups[2])
        run(model, optimizer, range(1, 5))
        save(optimizer, good, group=groups[2])
    on_rank_0(world, copy_files, good, mixed, "__0_*")
    for size, group in groups.items():
        if world.rank < size:
            other, loaded = trained(world, 2, seed=1, group=group)
            refused(other, loaded, mixed, of_steps(1, 5), group)
            load(loaded, good, group)
            if world.rank < 2:
                assert_same_model(other, model)
    dist.barrier()


@on_ranks(2)
def test_files_of_torch_save_of_two_saves_are_refused(world):
    files = []
    for seed in (0, 1):
        _, optimizer = trained(world, 2, seed)
        files.append(io.BytesIO())
        torch.save(optimizer.state_dict(), files[-1])
    model, optimizer = trained(world, 3)
    for saves in ((0, 1), (1, 0), (1, 1)):
        file = files[saves[world.rank]]
        file.seek(0)
        state = torch.load(file, weights_only=True)
        if saves == (1, 1):
            optimizer.load_state_dict(state)
        else:
            refused(model, optimizer, state, of_steps(2, 2))


# What is in the files


def rewrite(path: Path, change: Callable[[str, Any], Any]) -> None:
    """Give each chunk and each value of a checkpoint to `change`, with its key, and write what it returns."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    contents, new = {file.name: file.read_bytes() for file in path.glob("*.distcp")}, {}
    for index, info in metadata.storage_data.items():
        file, out = io.BytesIO(contents[info.relative_path][info.offset :][: info.length]), io.BytesIO()
        torch.save(change(index.fqn, torch.load(file, weights_only=False)), out)
        already = new.setdefault(info.relative_path, b"")
        info.offset, info.length = len(already), len(out.getvalue())
        new[info.relative_path] = already + out.getvalue()
    for name, content in new.items():
        (path / name).write_bytes(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def without_id(_: str, value: Any) -> Any:
    """As another optimizer, or a tool, writes it."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    value.save_id = None
    return value


def found_ids(path: Path) -> set:
    found = set()

    def note(_: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel():
            found.add(getattr(value, ATTRIBUTE)[3] if isinstance(value, torch.Tensor) else value.save_id)
        return value

    rewrite(path, note)
    return found


@on_ranks(2)
@pytest.mark.parametrize("thread_count", [1, 2])
def test_one_id_is_in_all_chunks_also_of_async_save(world, thread_count):
    """That of what was there when it was called. Good saves into one folder load, one after the other."""
    path, ids = shared_folder(world), []
    model, optimizer = trained(world, 1)
    save(optimizer, path, 3 - thread_count)
    own = dist.new_group(backend="cpu:gloo,cuda:nccl" if world.device.type == "cuda" else None)
    for steps in (range(1, 3), range(3, 5)):
        how = {"storage_writer": dcp.FileSystemWriter(path, thread_count=thread_count), "process_group": own}
        stager = DefaultStager(StagingOptions(False, False, False, False))
        future = dcp.async_save({"optimizer": optimizer}, async_stager=stager, **how)
        expected = masters(optimizer)
        run(model, optimizer, steps)
        future.result()
        _, loaded = trained(world, 4, seed=1)
        load(loaded, path)
        assert_all_equal(masters(loaded), expected, "master")
        on_rank_0(world, lambda: ids.append(found_ids(path)))
    if world.rank == 0:
        assert all(len(found) == 1 and None not in found for found in ids) and ids[0] != ids[1], ids


def masters(optimizer) -> list[torch.Tensor]:
    return [master.clone() for master in optimizer.gathered_masters() if master is not None]


@on_ranks(2)
def test_a_checkpoint_without_ids_loads_and_not_beside_one_with_ids(world):
    path = shared_folder(world)
    model, optimizer = trained(world, 1)
    save(optimizer, path)
    on_rank_0(world, rewrite, path, without_id)
    other, loaded = trained(world, 2, seed=1)
    load(loaded, path)
    assert_same_model(other, model)
    save(optimizer, path)
    on_rank_0(world, rewrite, path, lambda k, v: without_id(k, v) if "first.weight.exp_avg" in k else v)
    refused(other, loaded, path, r"first.weight.exp_avg(_sq)? of a save without an id")


@on_ranks(2)
@pytest.mark.parametrize("key", ["steps", "param_groups"])
def test_options_and_steps_of_another_save_are_refused(world, key):
    """A rank with few elements may write nothing else."""
    path, values = shared_folder(world), {}
    model, optimizer = trained(world, 1)
    save(optimizer, path)
    on_rank_0(world, rewrite, path, lambda k, v: values.setdefault(k, v))
    run(model, optimizer, range(1, 5))
    save(optimizer, path)
    on_rank_0(world, rewrite, path, lambda k, v: values[k] if k == f"optimizer.{key}" else v)
    refused(*trained(world, 2, seed=1), path, rf"{key} of save \S+ at step 1")


@on_ranks(2)
def test_what_was_read_and_is_written_again_keeps_its_id(world):
    """A checkpoint is rewritten without its optimizer, on as many ranks or on one; a mixture stays one."""
    old, new, mixed = (shared_folder(world) for _ in range(3))
    model, optimizer = trained(world, 1)
    save(optimizer, old)
    save(optimizer, mixed)
    run(model, optimizer, range(1, 5))
    save(optimizer, new)
    on_rank_0(world, copy_files, new, mixed, "__1_*")
    other, loaded = trained(world, 2, seed=1)
    for source in (mixed, old):
        state = {"optimizer": loaded.state_dict()}
        dcp.load(state, checkpoint_id=source)
        dcp.save(state, checkpoint_id=new)
        if source is mixed:
            refused(other, loaded, new, of_steps(1, 5))
        else:
            load(loaded, new)
            assert loaded.state_dict()["steps"] == 1
    alone = dist.new_group([0])
    if world.rank == 0:
        _, optimizer = trained(world, 2, group=alone)
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=mixed, process_group=alone)
        with pytest.raises(dcp.CheckpointException, match="mixes 2 saves"):
            dcp.save(state, checkpoint_id=new, process_group=alone)
    dist.barrier()
