"""A checkpoint of several ranks, beside one of plain FP32 DTensors; exports, and a checkpoint of others."""

import argparse
import collections
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zerofp4
from benchmarks.ranks import MEGABYTES, Timer
from benchmarks.session import Session
from benchmarks.step import with_gradients
from benchmarks.workloads import CONFIGS, causal_model, parameters_of, weight_shapes
from examples.training.checkpoints import from_rank_0
from zerofp4.launch import World

TMPFS = "/dev/shm"
CONFIG = CONFIGS / "llama_3_8b.json"
WHAT = {
    "zerofp4": "masters, moments and steps, by pieces",
    "dtensors": "FP32 DTensors of the same shapes, Shard(0)",
}


def checkpoint(session: Session, options: argparse.Namespace, world: World) -> None:
    """dcp.save and dcp.load of ZeroFP4Optimizer's masters and moments, beside DTensors of the same bytes.

    Under torchrun on several ranks, or as one process. Both states are there at once, 12 bytes for each
    element of the weights, and are saved and loaded by turns, each into a folder of its own on the same kind
    of storage; what is read was written just before, so that the system's cache has it. The first round is
    not counted. A time is that of the slowest rank, and the median of all rounds.

    Memory is what a rank peaked at above what it held before, in percent of its part of the state, the most
    of any rank and round: on the host resident memory, on the GPU torch's count.

    With --scale 2, a model of 1.7 billion elements, a state is 21 GB: 55 GB of memory on all GPUs, 42 GB of
    the storage, and 21 GB on the host while torch saves from a GPU. It is written and read 2 (1 + REPEATS)
    times: at 1 GB/s, 21 seconds each, --repeats 3 takes 6 minutes. --scale 4 takes a quarter of all that.
    """
    shapes, timer = weight_shapes(options.scale), Timer(session, world, options.repeats)
    states = {"zerofp4": optimizer_state(shapes, world), "dtensors": plain_state(shapes, world)}
    sizes = {name: bytes_here(state) for name, state in states.items()}
    for name, size in sizes.items():
        timer.count(f"{name}_state", "megabytes", size / 1e6, "the state on rank 0")
    found = collections.defaultdict(list)
    with shared_folder(options.storage, sum(sizes.values()), world) as folder:
        for number in range(1 + options.repeats):
            for name, state in states.items():
                for part, figures in save_and_load(state, folder / name, world).items():
                    words = f"round {number} of {options.repeats}: {name} {part} {figures[0]:,.0f} ms"
                    session.say(f"    {words}")
                    found[name, part] += [figures] if number else []
    medians = {key: report(timer, *key, rounds, sizes[key[0]]) for key, rounds in found.items()}
    for part in ("save", "load"):
        ratio = medians["zerofp4", part] / medians["dtensors", part]
        timer.count(f"{part}_over_dtensors", "ratio", ratio, f"{part} of ours over that of DTensors")


@contextlib.contextmanager
def shared_folder(storage: str, size: int, world: World) -> Iterator[Path]:
    """A temporary folder, the same on every rank. size: bytes that a rank writes there. Raises
    CheckpointError, on every rank, where there is less space.
    """

    def make() -> Path:
        folder = Path(tempfile.mkdtemp(prefix="zerofp4-bench-", dir=TMPFS if storage == "tmpfs" else None))
        free, needed = shutil.disk_usage(folder).free, size * world.world_size
        if free < needed:
            folder.rmdir()
            what = f"{folder}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are written"
            raise OSError(f"{what}: set another TMPDIR, or a larger --scale")
        return folder

    folder = from_rank_0(make, world)
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


# The states


def optimizer_state(shapes: list[tuple[int, int]], world: World) -> dict:
    named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters_of(shapes, world.device))]
    optimizer = zerofp4.optim.ZeroFP4Optimizer(named, zerofp4.optim.FusedAdamW, lr=1e-4)
    with_gradients([parameter for _, parameter in named])
    optimizer.step()
    optimizer.zero_grad()
    return {"optimizer": optimizer}


def plain_state(shapes: list[tuple[int, int]], world: World) -> dict:
    """Masters and two moments, as FSDP2 holds them."""
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    return {
        f"layers.{i}.weight.{name}": distribute_tensor(
            torch.randn(shape, device=world.device), mesh, [Shard(0)]
        )
        for i, shape in enumerate(shapes)
        for name in ("master", "exp_avg", "exp_avg_sq")
    }


def bytes_here(state: dict) -> int:
    """Of this rank's part."""
    if "optimizer" not in state:
        return sum(tensor.to_local().nbytes for tensor in state.values())
    entries = state["optimizer"].state_dict()["state"].values()
    return sum(piece.values.nbytes for entry in entries for piece in entry.values())


# A round


def save_and_load(state: dict, folder: Path, world: World) -> dict[str, list[float]]:
    """By "save" and "load": milliseconds, and bytes above what was held, on the host and on the GPU."""
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)

    def load() -> None:
        if "optimizer" in state:  # it is loaded into one that has taken no step, as after a restart
            inner = state["optimizer"].inner
            inner.load_state_dict({**inner.state_dict(), "state": {}})
        dcp.load(state, checkpoint_id=folder)

    return {"save": once(lambda: dcp.save(state, checkpoint_id=folder), world), "load": once(load, world)}


def once(run: Callable[[], object], world: World) -> list[float]:
    on_gpu = world.device.type == "cuda"
    if world.rank == 0:
        os.sync()  # what the one before left to be written is not this one's
    dist.barrier()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak from here on
    before, begin = resident("VmRSS"), time.perf_counter()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - begin) * 1e3
    above = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    return [milliseconds, resident("VmHWM") - before, above]


def resident(name: str) -> int:
    """Bytes: VmRSS are those now, VmHWM the most there were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def report(timer: Timer, name: str, part: str, rounds: list[list[float]], size: int) -> float:
    """Rows of what was found, each of the worst rank. Returns the median of the milliseconds."""
    worst = torch.tensor(rounds, dtype=torch.float64, device=timer.device)
    worst[:, 1:] *= 100 / size
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    median = worst[:, 0].median().item()
    timer.count(f"{name}_{part}", "milliseconds", median, WHAT[name])
    for i, place in enumerate(("host", "gpu") if timer.device.type == "cuda" else ("host",), 1):
        rule = f"{place} memory at the peak, above what was held"
        timer.count(f"{name}_{part}_{place}", "percent_of_state", worst[:, i].max().item(), rule)
    return median


# An export


def export(session: Session, options: argparse.Namespace, world: World) -> None:
    """serving.save_pretrained of the shape of Llama-3-8B in blocks of 1x16, with random weights.

    Needs transformers and safetensors. Memory is what rank 0, which writes, peaks at above what it held
    before: on the host resident memory, on the GPU torch's count; the most of all repeats. Figures of time
    are the median, and depend on the storage.

    At full size the model takes 16 GB in bfloat16, and then 6 GB; the export is 6 GB.
    """
    timer, model = Timer(session, world, options.repeats), causal_model(CONFIG, world.device, options.scale)
    zerofp4.convert_model(model, block=(1, 16), amax_groups=zerofp4.serving.amax_groups(model))
    for parameter in model.parameters():
        if isinstance(parameter, zerofp4.NVFP4Tensor):
            parameter.clear_high_precision_init_val()  # what it was made from
    size = sum(served.nbytes for served in zerofp4.serving.weights(model).served)
    timer.count("size", "megabytes", size / MEGABYTES, "tensors of the export")
    found, tenths = [], set()

    def show(done: int, total: int) -> None:
        if done * 10 // total not in tenths:
            tenths.add(done * 10 // total)
            session.say(f"    {done / MEGABYTES:,.0f} of {total / MEGABYTES:,.0f} MB")

    save = zerofp4.serving.save_pretrained
    with shared_folder(options.storage, size, world) as folder:
        for number in range(options.repeats):
            tenths.clear()
            found.append(once(lambda: save(model, folder / "served", progress=show), world))
            session.say(f"    export {number + 1} of {options.repeats}: {found[-1][0]:,.0f} ms")
    count_all(timer, "save", found, "save_pretrained, on rank 0", "above what was held")


def count_all(timer: Timer, name: str, found: list[list[float]], what: str, above: str) -> None:
    """Rows of repeats of once(): the median of the milliseconds, and the most memory."""
    milliseconds, *memory = zip(*found, strict=True)
    median = torch.tensor(milliseconds, dtype=torch.float64).median().item()
    timer.count(name, "milliseconds", median, what)
    for place, peaks in zip(("host", "gpu"), memory, strict=True):
        if place == "host" or timer.device.type == "cuda":
            rule = f"memory of the {place} {above}, at its peak"
            timer.count(f"{place}_memory", "megabytes", max(peaks) / MEGABYTES, rule)


# A checkpoint of others

FILE_BYTES = 2 * 10**9
"""After which the next file of a published checkpoint begins."""


def load(session: Session, options: argparse.Namespace, world: World) -> None:
    """serving.load_pretrained of a ModelOpt checkpoint of the shape of Llama-3-8B, with random codes.

    Needs transformers and safetensors. The model is on the meta device and gets memory on the rank's device.
    Rank 0 writes the files just before, so the system's cache may have them. Memory is what rank 0 peaks at
    above what it held before and what the model keeps, the most of all repeats: on the host resident memory,
    on the GPU torch's count. Time is the median.

    At full size (--scale 1) the files take 6 GB, and so does the model.
    """
    timer, found = Timer(session, world, options.repeats), []
    shapes = causal_model(CONFIG, torch.device("meta"), options.scale)
    size = sum(2 * p.numel() for p in shapes.parameters())  # at most
    with shared_folder(options.storage, size, world) as folder:
        if world.rank == 0:
            write_published(shapes, folder)
        for number in range(options.repeats):
            model = causal_model(CONFIG, torch.device("meta"), options.scale)
            with world.device:
                figures = once(lambda model=model: zerofp4.serving.load_pretrained(model, folder), world)
            kept = sum(parameter.nbytes for parameter in model.parameters())
            figures[2 if world.device.type == "cuda" else 1] -= kept
            found.append(figures)
            session.say(f"    load {number + 1} of {options.repeats}: {figures[0]:,.0f} ms")
    count_all(timer, "load", found, "load_pretrained, on rank 0", "above what was held and the model")
    weights = [p for p in model.parameters() if isinstance(p, zerofp4.NVFP4Tensor)]
    for name, some in (("weights", weights), ("parameters", [*model.parameters()])):
        each = sum(p.nbytes for p in some) / sum(p.numel() for p in some)
        timer.count(name, "bytes_per_parameter", each, "in NVFP4" if name == "weights" else "all")


def write_published(model: nn.Module, folder: Path) -> None:
    """A checkpoint as ModelOpt writes it, of a model on the meta device: random codes and block scales, and
    everything else 0.
    """
    from safetensors.torch import save_file

    held: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def write_held() -> None:
        file = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(held, folder / file)
        weight_map.update(dict.fromkeys(held, file))
        held.clear()

    for key, parameter in model.named_parameters():
        if key.endswith("_proj.weight"):
            rows, columns = parameter.shape
            held[key] = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device="cpu")
            scales = torch.randint(1, 127, (rows, columns // 16), dtype=torch.uint8, device="cpu")
            held[f"{key}_scale"] = scales.view(torch.float8_e4m3fn)
            held[f"{key}_scale_2"] = torch.tensor(1 / 2688, dtype=torch.float32, device="cpu")
        else:
            held[key] = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
        if sum(tensor.nbytes for tensor in held.values()) > FILE_BYTES:
            write_held()
    write_held()
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
