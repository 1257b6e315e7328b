"""A checkpoint of several ranks, beside one of plain FP32 DTensors of the same bytes."""

import argparse
import resource
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
MEGABYTES = 1e6


def checkpoint(session: Session, options: argparse.Namespace, world: World) -> None:
    """dcp.save and dcp.load of ZeroFP4Optimizer's masters and moments, beside DTensors of the same bytes.

    Medians of what the slowest rank takes, into and out of the folder --folder (default: a temporary one);
    what is read was written just before, so that the system's cache has it. Host memory is what the process
    peaked at above what it held, over all repeats, in all the rows so far.
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
        on_gpu, before = self.world.device.type == "cuda", peak_host_bytes()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        save = self._ms(lambda: dcp.save(state, checkpoint_id=self.folder), clear=True)
        load = self._ms(lambda: resume(state, self.folder), clear=False)
        self.session.count(f"{name}_save/{self.places}", "milliseconds", save, what)
        self.session.count(f"{name}_load/{self.places}", "milliseconds", load, what)
        host = (peak_host_bytes() - before) / MEGABYTES
        self.session.count(f"{name}_host/{self.places}", "megabytes", host, "host memory above it, rank 0")
        if on_gpu:
            above = (torch.cuda.max_memory_allocated() - held) / MEGABYTES
            self.session.count(f"{name}_gpu/{self.places}", "megabytes", above, "GPU memory above it, rank 0")
        return save, load

    def _ms(self, run: Callable[[], object], clear: bool) -> float:
        times = [self._once(run, clear) for _ in range(1 + self.repeats)][1:]
        longest = torch.tensor(times, device=self.world.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.median().item()

    def _once(self, run: Callable[[], object], clear: bool) -> float:
        if clear and self.world.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()
        begin = time.perf_counter()
        run()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3


def resume(state: dict, folder: Path) -> None:
    """A load into an optimizer that has taken no step, as after a restart."""
    if "optimizer" in state:
        state["optimizer"].inner.state.clear()
    dcp.load(state, checkpoint_id=folder)


def peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
