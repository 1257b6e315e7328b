"""What a save and a load take beside the state itself, and what becomes of memory that a load was lent."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from early import waits_for
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.nn import functional as F

import zerofp4
from distributed.cases import raised_by
from distributed.checks_optim import check_weights
from distributed.processes import device_for
from distributed.run import on_ranks, run_ranks
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer, read_chunks
from zerofp4.optim.read_chunks import ReadChunks

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


CASES = [pytest.param(size, run, marks=waits_for(run)) for size, run in ((1, alone), (2, two_ranks))]


@pytest.mark.parametrize(("world_size", "run"), CASES)
def test_memory_above_the_state(early, world_size, run):
    if device_for(world_size) == "cpu" and not can_count():
        pytest.skip("this system does not let a process have its peak of memory counted anew")
    outcome = early(run)
    # A rank alone keeps no memory for gradients in which new masters could wait.
    most = {"save": MOST, "load": MOST + (MASTERS if world_size == 1 else 0)}
    for shares in outcome.values:
        assert all(share < most[part] for part, share in shares.items()), outcome.values


class Model(nn.Module):
    """Sizes that leave gaps between parameters and between ranks."""

    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def values(*shape):
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        self.first = nn.Parameter(zerofp4.quantize(values(34, 48), columnwise=True))
        self.second = nn.Parameter(zerofp4.quantize(values(20, 34), columnwise=True))
        self.bias = nn.Parameter(values(34))
        self.scale = nn.Parameter(values(20))

    def forward(self, x):
        return F.linear(F.linear(x, self.first, self.bias).relu(), self.second) * self.scale


def small(world, **options):
    model = Model(world.device)
    return model, ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=0.02, **options)


def backward(world, model, step):
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    x = torch.randn(8, 48, generator=generator).to(world.device, torch.bfloat16)
    model(x).float().square().mean().backward()


def train(world, model, optimizer, steps, clip=None):
    norms = []
    for step in steps:
        backward(world, model, step)
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def saved(world, steps, clip=None):
    """A model and its optimizer after so many steps, and the folder of a checkpoint of these."""
    folder = shared_folder(world) / "c"
    model, optimizer = small(world)
    train(world, model, optimizer, range(steps), clip)
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    return model, optimizer, folder


def memory_of_gradients(optimizer):
    ranges = []
    for source in optimizer._reducer._sources:
        first = source.flat.data_ptr()
        ranges.append(range(first, first + source.flat.nbytes))
    return ranges


def lies_there(optimizer, state_dict):
    """By parameter, whether its master is read into the memory of gradients."""
    ranges = memory_of_gradients(optimizer)
    masters = [entries["master"] for entries in state_dict["state"].values()]
    return [
        any(piece.present().data_ptr() in own for own in ranges) for piece in masters if piece.values.numel()
    ]


def read(optimizer, folder):
    state_dict = optimizer.state_dict()
    dcp.load({"optimizer": state_dict}, checkpoint_id=folder)
    return state_dict


def assert_same_masters(one, other, what):
    for i, (a, b) in enumerate(zip(one.gathered_masters(), other.gathered_masters(), strict=True)):
        assert_bytes_equal(a, b, f"{what}: master {i}")


@on_ranks(2, 3)
@pytest.mark.parametrize("loaded", [True, False])
def test_steps_after_masters_waited_where_gradients_travel(world, loaded):
    """Whether they were taken or not: no bit of them is left between the gradients."""
    folder = shared_folder(world)
    models = [small(world) for _ in range(2)]
    for model, optimizer in models:
        train(world, model, optimizer, range(2))
        if optimizer is models[0][1]:
            dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "c")
            state_dict = read(optimizer, folder / "c")
            assert all(lies_there(optimizer, state_dict))
            if loaded:
                optimizer.load_state_dict(state_dict)
    norms = [train(world, *model, range(2, 5), clip=0.5) for model in models]
    assert norms[0] == norms[1]
    assert_same_masters(models[0][1], models[1][1], "after the load")
    check_weights(list(models[0][0].parameters()), models[0][1])


@on_ranks(2)
def test_gradients_that_are_there_stay(world):
    model, optimizer, folder = saved(world, steps=1)
    backward(world, model, 1)
    before = [p.grad.clone() for p in model.parameters()]
    state_dict = read(optimizer, folder)
    assert not any(lies_there(optimizer, state_dict))
    optimizer.load_state_dict(state_dict)
    for i, (p, gradient) in enumerate(zip(model.parameters(), before, strict=True)):
        assert_bytes_equal(p.grad, gradient, f"gradient {i}")


@on_ranks(2)
def test_gradients_that_moved_together_stay(world):
    """On a CPU share_memory_() of one takes the memory of all along."""
    model, optimizer, folder = saved(world, steps=1)
    backward(world, model, 1)
    before = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.share_memory_()
    optimizer.load_state_dict(read(optimizer, folder))
    for i, (p, gradient) in enumerate(zip(model.parameters(), before, strict=True)):
        assert_bytes_equal(p.grad, gradient, f"gradient {i}")


@on_ranks(2)
def test_what_was_read_into_memory_of_its_own_is_used(world):
    """Gradients were there when it was read; they go, and others come, without an effect on it."""
    model, optimizer, folder = saved(world, steps=1)
    masters = optimizer.gathered_masters()
    backward(world, model, 1)
    state_dict = read(optimizer, folder)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(state_dict)
    for i, (now, before) in enumerate(zip(optimizer.gathered_masters(), masters, strict=True)):
        assert_bytes_equal(now, before, f"master {i}")


@on_ranks(2)
def test_a_state_dict_that_is_read_in_two_parts(world):
    """The first is lost where gradients came in between, whatever is lent to the second."""
    model, optimizer, folder = saved(world, steps=2)
    state_dict = optimizer.state_dict()
    items = list(state_dict["state"].items())
    halves = [state_dict | {"state": dict(own)} for own in (items[:2], items[2:])]
    dcp.load({"optimizer": halves[0]}, checkpoint_id=folder)
    train(world, model, optimizer, range(2, 3))
    dcp.load({"optimizer": halves[1]}, checkpoint_id=folder)
    error = raised_by(lambda: optimizer.load_state_dict(state_dict))
    assert isinstance(error, ValueError) and "gradients or another load needed since" in str(error), error
    assert "first.master" in str(error) and "bias.master" not in str(error)
    dcp.load({"optimizer": halves[0]}, checkpoint_id=folder)
    optimizer.load_state_dict(state_dict)


@on_ranks(2)
def test_what_was_copied_into_a_state_dict_is_not_used_once_it_is_overwritten(world):
    model, optimizer = small(world)
    train(world, model, optimizer, range(2))
    state_dict = optimizer.state_dict()
    for master, entries in zip(optimizer.gathered_masters(), state_dict["state"].values(), strict=True):
        entries["master"].copy_(master)
    assert all(lies_there(optimizer, state_dict))
    backward(world, model, 2)
    error = raised_by(lambda: optimizer.load_state_dict(state_dict))
    assert isinstance(error, ValueError) and "gradients or another load needed since" in str(error), error


@on_ranks(2)
@pytest.mark.parametrize("then", ["backward", "step", "another load"])
@pytest.mark.parametrize("clipped", [False, True])
def test_what_was_read_is_not_used_once_it_is_overwritten(world, clipped, then):
    """On every rank, also where the memory is that of reduced gradients; nothing changes."""
    model, optimizer, folder = saved(world, steps=2, clip=0.5 if clipped else None)
    state_dict = read(optimizer, folder)
    label = "first.master"
    if then == "backward" and world.rank == 0:
        backward(world, model, 2)
    elif then == "step":
        train(world, model, optimizer, range(2, 3))
    elif then == "another load":
        other = read(optimizer, folder)
    masters = optimizer.gathered_masters()
    error = raised_by(lambda: optimizer.load_state_dict(state_dict))
    if then == "backward" and clipped:  # the memory of reduced gradients is not that of p.grad
        assert error is None
        return
    assert isinstance(error, ValueError) and "gradients or another load needed since" in str(error), error
    assert label in str(error)
    for i, (now, before) in enumerate(zip(optimizer.gathered_masters(), masters, strict=True)):
        assert_bytes_equal(now, before, f"master {i}")
    if then == "another load":
        optimizer.load_state_dict(other)


@on_ranks(2)
def test_gradients_wait_for_a_chunk_that_is_on_its_way_to_their_memory(world):
    """As a load leaves one that failed; nobody has its state dict any more."""
    optimizers = [small(world) for _ in range(2)]
    for model, optimizer in optimizers:
        train(world, model, optimizer, range(1))
    model, optimizer = optimizers[0]
    asked, found = threading.Event(), []
    abandon = ReadChunks.abandon
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_chunks, "LARGE", 0)
        patch.setattr(ReadChunks, "abandon", lambda self: (asked.set(), abandon(self)))
        entries = optimizer.state_dict()["state"].values()
        piece = next(own["master"] for own in entries if own["master"].values.numel())
        first = piece.__create_chunk_list__()[0]
        target = piece.__get_tensor_shard__(MetadataIndex("first", first.offsets))
        assert any(target.data_ptr() in own for own in memory_of_gradients(optimizer))

        def arrive(target=target):
            found.append(asked.wait(20))
            target.fill_(9e9)

        one_element = torch.empty(1)  # of more that the load expects
        target.place.reads.bring(one_element, arrive, nobody_else_writes=True)
        del entries, piece, target, arrive
        for own, _ in optimizers:
            backward(world, own, 1)
    assert found == [True]
    for i, (p, q) in enumerate(zip(*(own.parameters() for own, _ in optimizers), strict=True)):
        assert_bytes_equal(p.grad, q.grad, f"gradient {i}")
