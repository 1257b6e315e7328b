"""A checkpoint of several ranks, beside one of plain FP32 DTensors of the same bytes."""

import argparse
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


def checkpoint(session: Session, options: argparse.Namespace, world: World) -> None:
    """dcp.save and dcp.load of ZeroFP4Optimizer's masters and moments, beside DTensors of the same bytes.

    Medians of what the slowest rank takes, into and out of the folder --folder (default: a temporary one);
    what is read was written just before, so that the system's cache has it. Memory is what a rank peaked at
    above what it held before a save or load, in percent of its part of the state, the most of any rank and
    repeat: on the host resident memory, whose peak the kernel is told to forget; on the GPU torch's count.
    The optimizer has clipped, and so it has memory for FP32 gradients, in which new masters wait.
    """
    shapes = [shape for shape, is_weight in llama_sizes(options.scale) if is_weight]
    folder = [str(options.folder or tempfile.mkdtemp(prefix="zerofp4-bench-")) if world.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    timer = Timer(session, world, options.repeats, Path(folder[0]) / "checkpoint")
    ours = timer.both("zerofp4", optimizer_state(shapes, world), "masters, moments and steps, by pieces")
    theirs = timer.both("dtensors", plain_state(shapes, world), "FP32 DTensors of the same shapes, Shard(0)")
    for part, mine, other in zip(("save", "load"), ours, theirs, strict=True):
        target = MOST if world.device.type == "cuda" else None
        rule = f"{part} of ours over that of DTensors"
        session.count(f"{part}_over_dtensors/{timer.places}", "ratio", mine / other, rule, target=target)
    if world.rank == 0:
        shutil.rmtree(folder[0])


def optimizer_state(shapes: list[tuple[int, int]], world: World) -> dict:
    options = {"device": world.device, "dtype": torch.bfloat16}
    named = []
    for i, shape in enumerate(shapes):
        value = zerofp4.quantize(torch.randn(shape, **options), columnwise=True)
        named.append((f"layers.{i}.weight", nn.Parameter(value)))
    optimizer = zerofp4.optim.ZeroFP4Optimizer(named, zerofp4.optim.FusedAdamW, lr=1e-4)
    for _, parameter in named:
        parameter.grad = torch.full(parameter.shape, 1e-3, **options)
    optimizer.clip_grad_norm_(1.0)
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


class Timer:
    def __init__(self, session: Session, world: World, repeats: int, folder: Path):
        self.session, self.world, self.repeats, self.folder = session, world, repeats, folder
        self.places = f"{world.world_size}x{world.device.type}"

    def both(self, name: str, state: dict, what: str) -> tuple[float, float]:
        """Milliseconds of a save and of a load, with rows for them and for the memory that they take."""
        size = bytes_here(state)
        self.session.count(f"{name}_state/{self.places}", "megabytes", size / 1e6, "the state on rank 0")
        medians = []
        for part in ("save", "load"):
            once = {
                "save": lambda: dcp.save(state, checkpoint_id=self.folder),
                "load": lambda: resume(state, self.folder),
            }[part]
            found = [self._once(once, clear=part == "save") for _ in range(1 + self.repeats)][1:]
            times, *peaks = torch.tensor(found, dtype=torch.float64).unbind(1)
            medians.append(self._worst(times).median().item())
            self.session.count(f"{name}_{part}/{self.places}", "milliseconds", medians[-1], what)
            for place, peak in zip(("host", "gpu"), peaks, strict=True):
                most = self._worst(100 * peak / size).max().item()
                target = MOST_MEMORY if name == "zerofp4" and self.world.device.type == "cuda" else None
                row = f"{name}_{part}_{place}/{self.places}"
                rule = f"{place} memory at the peak, above what was held"
                if place == "host" or self.world.device.type == "cuda":
                    self.session.count(row, "percent_of_state", most, rule, target=target)
        return medians[0], medians[1]

    def _worst(self, values: torch.Tensor) -> torch.Tensor:
        values = values.to(self.world.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def _once(self, run: Callable[[], object], clear: bool) -> tuple[float, float, float]:
        """Milliseconds, and bytes above what was held, on the host and on the GPU."""
        if clear and self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        on_gpu = self.world.device.type == "cuda"
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
