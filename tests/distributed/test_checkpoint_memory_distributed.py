"""Memory that a save and a load take beside the state itself, and what was read between the two."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from early import waits_for
from optim_cases import assert_all_equal
from torch import nn

import zerofp4
from distributed.checkpoint_cases import build, make_model, run
from distributed.processes import device_for
from distributed.run import on_ranks, run_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

MOST = 0.05  # of the state of a rank
MASTERS = 1 / 3  # of AdamW's
COUNT, SIZE = 48, 512
UNCACHED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives back every block of a tensor, so that resident memory is what is held."""


def large(world):
    """An optimizer after a step that never clipped. What gloo copies to gather weights is small."""
    weight = torch.randn(SIZE, SIZE, device=world.device, dtype=torch.bfloat16)
    named = [
        (f"layers.{i}", nn.Parameter(zerofp4.quantize(weight, columnwise=True))) for i in range(COUNT - 1)
    ]
    named.append(("norm", nn.Parameter(weight.clone())))
    optimizer = ZeroFP4Optimizer(named, FusedAdamW, lr=1e-3, bucket_mb=2)
    for _, p in named:
        p.grad = torch.full((SIZE, SIZE), 1e-3, device=world.device, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def resume(optimizer, folder):
    """As after a restart: there are no moments yet."""
    inner = optimizer.inner
    inner.load_state_dict({**inner.state_dict(), "state": {}})
    dcp.load({"optimizer": optimizer}, checkpoint_id=folder)


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def most_above(world, call):
    """Bytes that the call took at its peak beyond what was held before."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - held
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is counted from here on
    held = memory("VmRSS")
    call()
    return memory("VmHWM") - held


def shared_folder(world):
    folder = [tempfile.mkdtemp() if world.rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def save_and_load(world):
    optimizer, folder = large(world), shared_folder(world)
    entries = optimizer.state_dict()["state"].values()
    state = sum(piece.values.nbytes for entry in entries for piece in entry.values())
    del entries
    shares = {}
    for _ in range(2):  # what torch makes once is made in the first
        shares["save"] = most_above(
            world, lambda: dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "c")
        )
        shares["load"] = most_above(world, lambda: resume(optimizer, folder / "c"))
        if world.rank == 0:
            shutil.rmtree(folder / "c")
    return {part: above / state for part, above in shares.items()}


def can_count():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def alone(_):
    return run_ranks(save_and_load, 1, "alone", env=UNCACHED)


def two_ranks(_):
    return run_ranks(save_and_load, 2, "torchrun", env=UNCACHED)


CASES = [pytest.param(size, how, marks=waits_for(how)) for size, how in ((1, alone), (2, two_ranks))]


@pytest.mark.parametrize(("world_size", "how"), CASES)
def test_memory_above_the_state(early, world_size, how):
    if device_for(world_size) == "cpu" and not can_count():
        pytest.skip("this system does not let a process have its peak of memory counted anew")
    outcome = early(how)
    most = {"save": MOST, "load": MOST + MASTERS}  # new masters wait beside the old ones
    for shares in outcome.values:
        assert all(share < most[part] for part, share in shares.items()), outcome.values


def masters(optimizer):
    return [master for master in optimizer.gathered_masters() if master is not None]


@on_ranks(2)
def test_what_was_read_stays_as_it_is_until_it_is_loaded(world):
    """Steps in between, and reading it in two parts, change nothing of it."""
    folder = shared_folder(world) / "c"
    model = make_model(world)
    optimizer = build(model, "fused")
    run(model, optimizer, range(2))
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    expected = masters(optimizer)
    state_dict = optimizer.state_dict()
    items = list(state_dict["state"].items())
    for part in (items[:2], items[2:]):
        dcp.load({"optimizer": state_dict | {"state": dict(part)}}, checkpoint_id=folder)
        run(model, optimizer, range(2, 4))
    optimizer.load_state_dict(state_dict)
    assert_all_equal(masters(optimizer), expected, "master")
