"""A checkpoint of several ranks, beside one of plain FP32 DTensors of the same bytes."""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from benchmarking.session import Session
from benchmarking.workloads import llama_sizes
from zerofp4.launch import World

MOST = 1.1  # of the time that the same bytes take torch
MOST_MEMORY = 5.0  # percent of the state, above it
TMPFS = "/dev/shm"


def checkpoint(session: Session, options: argparse.Namespace, world: World) -> None:
    """dcp.save and dcp.load of ZeroFP4Optimizer's masters and moments, beside DTensors of the same bytes.

    Under torchrun on several ranks, or as one process. Both states are there at once, 12 bytes for each
    element of the weights, and are saved and loaded by turns, each into a folder of its own on the same kind
    of storage; what is read was written just before, so that the system's cache has it. The first round is
    not counted. A time is that of the slowest rank, and the median of all rounds.

    Memory is what a rank peaked at above what it held before, in percent of its part of the state, the most
    of any rank and round: on the host resident memory, whose peak the kernel is told to forget; on the GPU
    torch's count.

    With --scale 2, a model of 1.7 billion elements, a state is 21 GB: 55 GB of memory on all GPUs, 42 GB of
    the storage, and 21 GB on the host while torch saves from a GPU. It is written and read 2 (1 + REPEATS)
    times: at 1 GB/s, 21 seconds each, --repeats 3 takes 6 minutes. --scale 4 takes a quarter of all that.
    """
    shapes = [shape for shape, is_weight in llama_sizes(options.scale) if is_weight]
    states = {"zerofp4": optimizer_state(shapes, world), "dtensors": plain_state(shapes, world)}
    folder = shared_folder(options, sum(bytes_here(state) for state in states.values()), world)
    try:
        compare(session, states, folder, options.repeats, world)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


def compare(session: Session, states: dict, folder: Path, repeats: int, world: World) -> None:
    timer = Timer(session, world)
    for name, state in states.items():
        size = bytes_here(state) / 1e6
        session.count(f"{name}_state/{timer.places}", "megabytes", size, "the state on rank 0")
    for number in range(1 + repeats):
        for name, state in states.items():
            timer.save_and_load(name, state, folder / name, f"round {number} of {repeats}", number > 0)
    medians = {key: timer.report(*key) for key in timer.found}
    for part in ("save", "load"):
        target = MOST if world.device.type == "cuda" else None
        rule = f"{part} of ours over that of DTensors"
        ratio = medians["zerofp4", part] / medians["dtensors", part]
        session.count(f"{part}_over_dtensors/{timer.places}", "ratio", ratio, rule, target=target)


def shared_folder(options: argparse.Namespace, size: int, world: World) -> Path:
    """A new folder, the same on every rank. size: bytes that a rank writes there. Raises OSError, on every
    rank, where there is less space.
    """
    found: list = [None, None]
    if world.rank == 0:
        parent = options.folder or (TMPFS if options.storage == "tmpfs" else tempfile.gettempdir())
        try:
            found[0] = tempfile.mkdtemp(prefix="zerofp4-bench-", dir=parent)
            free, needed = shutil.disk_usage(found[0]).free, size * world.world_size
            if free < needed:
                Path(found[0]).rmdir()
                found[1] = (
                    f"{parent} has {free / 1e9:.1f} GB free, and two checkpoints take {needed / 1e9:.1f}"
                )
        except OSError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise OSError(f"{found[1]}: name another --folder, or a larger --scale")
    return Path(found[0])


def optimizer_state(shapes: list[tuple[int, int]], world: World) -> dict:
    options = {"device": world.device, "dtype": torch.bfloat16}
    named = []
    for i, shape in enumerate(shapes):
        value = zerofp4.quantize(torch.randn(shape, **options), columnwise=True)
        named.append((f"layers.{i}.weight", nn.Parameter(value)))
    optimizer = zerofp4.optim.ZeroFP4Optimizer(named, zerofp4.optim.FusedAdamW, lr=1e-4)
    for _, parameter in named:
        parameter.grad = torch.full(parameter.shape, 1e-3, **options)
    optimizer.step()
    optimizer.zero_grad()
    return {"optimizer": optimizer}


def plain_state(shapes: list[tuple[int, int]], world: World) -> dict:
    """Masters and two moments, as FSDP2 holds them."""
    mesh = init_device_mesh(world.device.type, (world.world_size,))

    def sharded(shape: tuple[int, int]) -> torch.Tensor:
        return distribute_tensor(torch.randn(shape, device=world.device), mesh, [Shard(0)])

    return {
        f"layers.{i}.weight.{name}": sharded(shape)
        for i, shape in enumerate(shapes)
        for name in ("master", "exp_avg", "exp_avg_sq")
    }


WHAT = {
    "zerofp4": "masters, moments and steps, by pieces",
    "dtensors": "FP32 DTensors of the same shapes, Shard(0)",
}


class Timer:
    """found: by kind of state and by "save" or "load", of every round that counts: milliseconds, and bytes on
    the host and on the GPU as a share of the state.
    """

    def __init__(self, session: Session, world: World):
        self.session, self.world = session, world
        self.places = f"{world.world_size}x{world.device.type}"
        self.found: dict[tuple[str, str], list[list[float]]] = {}

    def save_and_load(self, name: str, state: dict, folder: Path, number: str, counts: bool) -> None:
        size = bytes_here(state)
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        runs = {
            "save": lambda: dcp.save(state, checkpoint_id=folder),
            "load": lambda: resume(state, folder),
        }
        for part, run in runs.items():
            milliseconds, host, gpu = self._once(run)
            self.session.say(f"    {number}: {name} {part} {milliseconds:,.0f} ms")
            if counts:
                self.found.setdefault((name, part), []).append([milliseconds, host / size, gpu / size])

    def report(self, name: str, part: str) -> float:
        """Rows of what was found. Returns the median of the slowest rank's milliseconds."""
        times, *shares = torch.tensor(self.found[name, part], dtype=torch.float64).unbind(1)
        median = self._worst(times).median().item()
        self.session.count(f"{name}_{part}/{self.places}", "milliseconds", median, WHAT[name])
        on_gpu = self.world.device.type == "cuda"
        for place, share in zip(("host", "gpu") if on_gpu else ("host",), shares, strict=False):
            target = MOST_MEMORY if name == "zerofp4" and on_gpu else None
            row, rule = (
                f"{name}_{part}_{place}/{self.places}",
                f"{place} memory at the peak, above what was held",
            )
            most = 100 * self._worst(share).max().item()
            self.session.count(row, "percent_of_state", most, rule, target=target)
        return median

    def _worst(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self.world.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def _once(self, run: Callable[[], object]) -> tuple[float, float, float]:
        """Milliseconds, and bytes above what was held, on the host and on the GPU."""
        on_gpu = self.world.device.type == "cuda"
        if self.world.rank == 0:
            os.sync()  # what the one before left to be written is not this one's
        dist.barrier()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        forget_peak()
        before, begin = resident("VmRSS"), time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - begin) * 1e3
        above = torch.cuda.max_memory_allocated() - held if on_gpu else 0
        return milliseconds, resident("VmHWM") - before, above


def resume(state: dict, folder: Path) -> None:
    """A load into an optimizer that has taken no step, as after a restart."""
    if "optimizer" in state:
        inner = state["optimizer"].inner
        inner.load_state_dict({**inner.state_dict(), "state": {}})  # which nothing keeps
    dcp.load(state, checkpoint_id=folder)


def bytes_here(state: dict) -> int:
    """Of this rank's part."""
    if "optimizer" not in state:
        return sum(tensor.to_local().nbytes for tensor in state.values())
    entries = state["optimizer"].state_dict()["state"].values()
    return sum(piece.values.nbytes for entry in entries for piece in entry.values())


def forget_peak() -> None:
    """Have the kernel count the most resident memory of this process from here on. Raises OSError where it
    does not let a process do that.
    """
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """Bytes: VmRSS are those now, VmHWM the most there were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
