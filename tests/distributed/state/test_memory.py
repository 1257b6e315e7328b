"""Memory that a save and a load take beside the state itself, and what was read between the two."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal
from early import waits_for
from torch import nn

import zerofp4
from distributed.cases import shared_folder
from distributed.processes import device_for
from distributed.run import on_ranks, run_ranks
from distributed.state.cases import run, saved, trained
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

MOST = {"save": 0.05, "load": 0.05 + 1 / 3}
"""Of the state of a rank: of AdamW's a third is masters, and new ones wait beside the old ones."""

COUNT, SIZE = 48, 512
UNCACHED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives back every block of a tensor, so that resident memory is what is held."""


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


def save_and_load(world):
    """After a step that never clipped. What gloo copies to gather weights is small."""
    weight = torch.randn(SIZE, SIZE, device=world.device, dtype=torch.bfloat16)
    named = [(f"layers.{i}", nn.Parameter(zerofp4.quantize(weight, columnwise=True))) for i in range(COUNT)]
    named[-1] = ("norm", nn.Parameter(weight.clone()))
    optimizer = ZeroFP4Optimizer(named, FusedAdamW, lr=1e-3, communication=Communication(bucket_mb=2))
    for _, p in named:
        p.grad = torch.full((SIZE, SIZE), 1e-3, device=world.device, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()
    entries = optimizer.state_dict()["state"].values()
    state = sum(piece.values.nbytes for entry in entries for piece in entry.values())
    folder, inner, shares = shared_folder(world) / "c", optimizer.inner, {}
    del entries

    def resume():
        """As after a restart: there are no moments yet."""
        inner.load_state_dict({**inner.state_dict(), "state": {}})
        dcp.load({"optimizer": optimizer}, checkpoint_id=folder)

    for _ in range(2):  # what torch makes once is made in the first
        shares["save"] = most_above(world, lambda: dcp.save({"optimizer": optimizer}, checkpoint_id=folder))
        shares["load"] = most_above(world, resume)
        if world.rank == 0:
            shutil.rmtree(folder)
    return {part: above / state for part, above in shares.items()}


def two_ranks(_):
    return run_ranks(save_and_load, 2, env=UNCACHED)


@pytest.mark.parametrize("how", [pytest.param(two_ranks, marks=waits_for(two_ranks))])
def test_memory_above_the_state(early, how):
    if device_for(2) == "cpu":
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("this system does not let a process have its peak of memory counted anew")
    found = early(how)
    for shares in found:
        assert all(share < MOST[part] for part, share in shares.items()), found


@on_ranks(2)
def test_what_was_read_stays_as_it_is_until_it_is_loaded(world):
    """Steps in between, and reading it in two parts, change nothing of it."""
    model, optimizer = trained(world, 2, "fused")
    folder, state_dict = saved(world, optimizer), optimizer.state_dict()
    expected = [m for m in optimizer.gathered_masters() if m is not None]
    items = list(state_dict["state"].items())
    for part in (items[:2], items[2:]):
        dcp.load({"optimizer": state_dict | {"state": dict(part)}}, checkpoint_id=folder)
        run(model, optimizer, range(2, 4))
    optimizer.load_state_dict(state_dict)
    assert_all_equal([m for m in optimizer.gathered_masters() if m is not None], expected, "master")
