"""A folder with chunks of two saves is refused, whoever left it so; every good checkpoint loads."""

from __future__ import annotations

import functools
import io
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distributed.cases import shared_folder
from distributed.run import on_ranks
from distributed.state import cases as checkpoint_cases
from distributed.state.cases import assert_same_model, contents, on_rank_0, run

trained = functools.partial(checkpoint_cases.trained, case="fused")


def save(optimizer, path, thread_count=1, group=None) -> None:
    writer = dcp.FileSystemWriter(path, thread_count=thread_count)
    dcp.save({"optimizer": optimizer}, storage_writer=writer, process_group=group)


def load(optimizer, path, group=None) -> None:
    dcp.load({"optimizer": optimizer}, checkpoint_id=path, process_group=group)


def refused(model, optimizer, source: Path | dict, match: str, group=None) -> None:
    """On every rank, with one message, and nothing changes. source: a checkpoint or a state dict."""
    before = contents(model, optimizer)
    with pytest.raises(ValueError, match=match) as raised:
        if isinstance(source, dict):
            optimizer.load_state_dict(source)
        else:
            load(optimizer, source, group)
    messages: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, str(raised.value), group=group)
    del raised  # it holds frames
    assert len(set(messages)) == 1, messages
    assert contents(model, optimizer) == before


def of_steps(one: int, other: int) -> str:
    """In either order."""
    first, second = (f"[0-9a-f]+-0+{step}" for step in (one, other))
    return rf"mixes saves: ({first}, {second}|{second}, {first})\."


def copy_files(source: Path, target: Path, pattern: str) -> None:
    """As if the rank of these files alone had ended its part of a save into the other folder."""
    files = list(source.glob(pattern))
    assert files
    for file in files:
        shutil.copy(file, target / file.name)


@on_ranks(3)
@pytest.mark.parametrize(("written", "thread_count"), [("__1_*", 1), ("__0_1*", 2)])
def test_a_save_that_did_not_end_in_an_old_folder_is_refused(world, written, thread_count):
    """In a world of any size, as if a rank had been killed, also where it has written one of its files."""
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    old, new = shared_folder(world), shared_folder(world)
    if world.rank < 2:
        model, optimizer = trained(world, 1, group=groups[2])
        save(optimizer, old, thread_count, groups[2])
        run(model, optimizer, range(1, 5))
        save(optimizer, new, thread_count, groups[2])
    on_rank_0(world, copy_files, new, old, f"{written}.distcp")
    for size, group in groups.items():
        if world.rank < size:
            other, loaded = trained(world, 2, seed=1, group=group)
            refused(other, loaded, old, of_steps(1, 5), group)
            load(loaded, new, group)
            assert loaded.state_dict()["steps"] == 5
            if world.rank < 2:
                assert_same_model(other, model)
    dist.barrier()


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


@on_ranks(2)
def test_files_of_torch_save_of_two_saves_are_refused(world):
    files = []
    for seed in (0, 1):
        torch.save(trained(world, 2, seed=seed)[1].state_dict(), file := io.BytesIO())
        files.append(file.getvalue())
    model, optimizer = trained(world, 3)
    states = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    refused(model, optimizer, states[world.rank], of_steps(2, 2))
    optimizer.load_state_dict(states[1])


@on_ranks(2)
def test_options_of_another_save_are_refused(world):
    """A rank with few elements may write nothing else."""
    model, optimizer = trained(world, 1)
    before, path = optimizer.state_dict()["param_groups"], shared_folder(world)
    run(model, optimizer, range(1, 5))
    save(optimizer.state_dict() | {"param_groups": before}, path)
    refused(*trained(world, 2, seed=1), path, of_steps(1, 5))


@on_ranks(1, 2)
def test_a_file_that_was_cut_is_refused(world):
    """On every rank; the optimizer is as it was."""
    path = shared_folder(world)
    save(trained(world, 2)[1], path)
    other, loaded = trained(world, 3, seed=1)
    before, file = contents(other, loaded), path / "__0_0.distcp"
    on_rank_0(world, lambda: os.truncate(file, file.stat().st_size // 2))
    with pytest.raises((Exception, dcp.CheckpointException)):
        load(loaded, path)
    assert contents(other, loaded) == before


@on_ranks(2)
def test_what_is_loaded_without_options_leaves_those_that_there_are(world):
    path = shared_folder(world)
    model, optimizer = trained(world, 1)
    save(optimizer, path)
    other, loaded = trained(world, 2, seed=1)
    state = loaded.state_dict()
    dcp.load({"optimizer": {"state": state["state"]}}, checkpoint_id=path)
    loaded.load_state_dict(state)
    assert_same_model(other, model)
