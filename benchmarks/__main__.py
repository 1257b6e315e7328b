"""Measures operations against the copy ceiling and against what others do, and shows the results.

    python -m benchmarks all                        operations on one device, on the GPU if there is one
    python -m benchmarks local_step --workload square --size 4096 --device cpu --threads 2
    python -m benchmarks quantize --no-peers        without what others do, the compiled reference above all
    torchrun --nproc-per-node 2 -m benchmarks step --transport collective peer
                                                    and others of ranks; also without torchrun
    torchrun --nproc-per-node 4 -m benchmarks hosts --hosts 2
                                                    training steps over slow links, emulated on one machine
    python -m benchmarks docs                       the tables and charts of docs/, from the results

Run it from the repository. Each subcommand has a --help of its own.

Workloads: `square` is one bf16 weight of SIZE x SIZE, owned whole, in rows named by its size. `llama3-8b` are
the 224 weights of Llama-3-8B's layers; the process owns what rank 1 of 4 owns when the flat buffer of the
whole model is cut into equal slices. `2000-small` are 2,000 weights of 768x768, 256x2880 and 256x2872,
each owned from an odd element. `268mb-scales` is a matrix whose scales of 1x16 blocks are 268 MB, `64-groups`
64 matrices of 4096x2048.

Times are medians after a warm-up; percentages are of a device-to-device copy measured in the same process
before and after (the higher of both), bytes read plus bytes written over time. Each row says how its bytes
were counted. An operation writes OUTPUT/<operation>_<device>.json.

Others are torch's own ways, and torchao, gemlite and fouroversix if they can be imported: installed, or
below a folder on PYTHONPATH. One that is absent or fails is said to be, and left out.
"""

import argparse
import gc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import output, pages, pictures
from benchmarks.checkpoints import checkpoint, export, load
from benchmarks.fidelity import FOLDER, OPTIONS, fidelity
from benchmarks.fsdp2 import CASES, fsdp2
from benchmarks.gradients import OPTIONS as OF_GRADIENTS
from benchmarks.gradients import gradients
from benchmarks.hosts import WAYS as OVER_HOSTS
from benchmarks.hosts import emulate, hosts
from benchmarks.large import EVERY_WAY, large
from benchmarks.megatron import megatron
from benchmarks.operations import OPERATIONS, SHOWN
from benchmarks.ranks import only_rank_0_speaks
from benchmarks.session import RESULTS, Session, keep_freed_memory, save
from benchmarks.small_batches import MODES, small_batches
from benchmarks.states import states
from benchmarks.step import step
from benchmarks.workloads import NAMES
from examples.training.options import at_least
from zerofp4.launch import destroy_process_group, init_process_group

CPU_SCALE_OF_RANKS = 64


def count(least: int, default: int | None, words: str) -> dict[str, Any]:
    return {"type": at_least(least), "default": default, "help": words}


def some_of(names) -> dict[str, Any]:
    return {"nargs": "+", "choices": names, "default": list(names), "help": "some of these (default: all)"}


class OfRanks(NamedTuple):
    """A benchmark of ranks: what runs, its default scale on GPUs and repeats (None: it has no such options),
    what repeats count, its own options, and what is done with them before the process group is made.
    """

    run: Callable
    scale: int | None
    repeats: int | None
    repeated: str
    options: dict[str, dict[str, Any]]
    prepare: Callable[[argparse.Namespace], None] = lambda options: None


STORAGE = {"choices": ("disk", "tmpfs"), "default": "disk"}
STORAGE["help"] = "where temporary folders are made: in TMPDIR, or in memory, in /dev/shm (default: disk)"
TRANSPORTS = {"nargs": "+", "choices": ("collective", "peer"), "default": ["collective"]}
TRANSPORTS["help"] = "of ZeroFP4Optimizer, one or both (default: collective)"
STEP = {
    "bucket_mb": {"type": float, "help": "of ZeroFP4Optimizer (default: its own)"},
    "transport": TRANSPORTS,
}
FSDP2 = {
    "cases": some_of(CASES),
    "layers": count(1, None, "of each model (default: 8 of Llama-3-8B's, 28 of the other)"),
    "tokens": count(1, 1024, "in a rank's batch (default: 1024)"),
}
SMALL = {"modes": some_of(MODES), "layers": count(1, None, "of the model (default: 16)")}
LARGE = {
    "config": {"required": True, "help": "config.json of transformers, or its folder"},
    "layers": count(1, None, "instead of the number that it has"),
    "ways": {"nargs": "+", "choices": EVERY_WAY, "help": "some (default: all of one rank, or of several)"},
    "micro_batches": count(1, 1, "of a step (default: 1)"),
    "sequences": count(1, 2, "of a micro-batch (default: 2)"),
    "tokens": count(2, 2048, "of a sequence (default: 2048)"),
    "repeats": count(1, 4, "steps per median (default: 4)"),
}
HOSTS = {
    "hosts": count(2, 2, "that are emulated (default: 2)"),
    "layers": count(1, 2, "of the model (default: 2)"),
    "tokens": count(1, 1024, "in a rank's batch (default: 1024)"),
    "ways": some_of(OVER_HOSTS),
}
OF_RANKS = {
    "step": OfRanks(step, 1, 20, "steps", STEP),
    "states": OfRanks(states, 1, 20, "steps", {}),
    "checkpoint": OfRanks(checkpoint, 2, 3, "saves and loads", {"storage": STORAGE}),
    "export": OfRanks(export, 1, 1, "exports", {"storage": STORAGE}),
    "load": OfRanks(load, 1, 1, "loads", {"storage": STORAGE}),
    "fsdp2": OfRanks(fsdp2, 1, 10, "groups of 4 steps", FSDP2),
    "megatron": OfRanks(megatron, 2, 20, "updates", {}),
    "small_batches": OfRanks(small_batches, 1, 10, "groups of 5 steps", SMALL),
    "large": OfRanks(large, None, None, "", LARGE),
    "hosts": OfRanks(hosts, 1, 5, "steps", HOSTS, emulate),
    "gradients": OfRanks(gradients, None, None, "", OF_GRADIENTS),
}


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    own = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, **own)
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")

    def command(name: str, description: str, options: dict[str, dict[str, Any]]) -> None:
        text = inspect.cleandoc(description)
        added = commands.add_parser(name, help=text.splitlines()[0], description=text, **own)
        for option, settings in options.items():
            added.add_argument(f"--{option.replace('_', '-')}", **settings)

    for name, (run, workloads) in OPERATIONS.items():
        command(name, run.__doc__, options_of(workloads))
    every = f"{', '.join(SHOWN[:-1])} and {SHOWN[-1]}, a result file each"
    command("all", every, options_of(NAMES))
    for name, benchmark in OF_RANKS.items():
        command(name, benchmark.run.__doc__, options_of_ranks(benchmark))
    output = {
        "type": Path,
        "default": FOLDER,
        "metavar": "DIR",
        "help": "default: benchmarks/results/fidelity",
    }
    command("fidelity", fidelity.__doc__, OPTIONS | {"output": output})
    command("docs", "write the tables and charts of docs/ from the results", {})
    options = parser.parse_args(arguments)
    if options.command in (*OPERATIONS, "all"):
        complete(options, parser)
    return options


OUTPUT = {"type": Path, "default": RESULTS, "metavar": "DIR", "help": "default: benchmarks/results"}


def options_of(workloads: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Of a benchmark on one device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = f"may be repeated (default: {', '.join(workloads)})"
    scale = "divides the length of 2000-small and the dimensions of other lists (default: 1, CPU 16)"
    found = {
        "device": {"choices": ["cuda", "cpu"], "default": device, "help": f"default here: {device}"},
        "workload": {"action": "append", "choices": workloads, "help": names},
        "size": count(2, None, "rows and columns of `square`, even (default: 16384, CPU 4096)"),
        "scale": count(1, None, scale),
        "repeats": count(1, 50, "runs per median, fewer of long ones (default: 50)"),
        "threads": count(1, None, "threads on the CPU (default: torch's)"),
        "no_peers": {"dest": "peers", "action": "store_false", "help": "leave out what others do"},
        "output": OUTPUT,
    }
    if "square" not in workloads:
        del found["size"]
    return found


def options_of_ranks(benchmark: OfRanks) -> dict[str, dict[str, Any]]:
    found = {}
    if benchmark.scale is not None:
        words = f"divides dimensions of the weights (default: {benchmark.scale}, CPU {CPU_SCALE_OF_RANKS})"
        found["scale"] = count(1, None, words)
        words = f"{benchmark.repeated} per median (default: {benchmark.repeats})"
        found["repeats"] = count(1, benchmark.repeats, words)
    return found | benchmark.options | {"output": OUTPUT}


def complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in what depends on the device, and refuse what does not go together."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda, but torch sees no GPU")
    on_gpu = options.device == "cuda"
    options.size = getattr(options, "size", None) or (16384 if on_gpu else 4096)
    options.scale = options.scale or (1 if on_gpu else 16)
    if options.size % 2:
        parser.error(f"argument --size: must be even, got {options.size}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def measure(name: str, options: argparse.Namespace) -> None:
    """Run one operation and write its result file."""
    run, workloads = OPERATIONS[name]
    settings = {"workload": [one for one in options.workload or workloads if one in workloads]}
    settings |= {key: getattr(options, key) for key in ("size", "scale", "repeats")}
    session = Session(name, torch.device(options.device), options.repeats)
    run(session, argparse.Namespace(**{**vars(options), **settings}))
    gc.collect()  # plans and weights hold one another, and the copy needs room
    write(session.result(settings), options.output)


def measure_on_ranks(options: argparse.Namespace) -> None:
    """All ranks measure, rank 0 writes."""
    benchmark = OF_RANKS[options.command]
    benchmark.prepare(options)
    world, copies, own = init_process_group(), 5, list(benchmark.options)
    try:
        if benchmark.scale is not None:
            scale = benchmark.scale if world.device.type == "cuda" else CPU_SCALE_OF_RANKS
            options.scale = options.scale or scale
            own, copies = ["scale", "repeats", *own], options.repeats
        with only_rank_0_speaks(world):
            name = f"{options.command}_{world.world_size}_ranks"
            session = Session(name, world.device, copies)
            benchmark.run(session, options, world)
            settings = {key: getattr(options, key) for key in own}
            result = session.result(settings)
            if world.rank == 0:
                write(result, options.output)
    finally:
        destroy_process_group()


def write(result: dict, folder: Path) -> None:
    path = save(result, folder)
    output.print_tables(result)
    print(f"wrote {path}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.command == "docs":
        paths = pages.write_docs()
        if importlib.util.find_spec("matplotlib") is None:
            print("no charts: matplotlib is not installed (the extra `train` has it)")
        else:
            paths += [pictures.draw_summary(), pictures.draw_memory(), pictures.draw_links()]
            paths += [pictures.draw_losses()]
        for path in paths:
            print(f"wrote {path}")
    elif options.command == "fidelity":
        fidelity(options)
    elif options.command in OF_RANKS:
        measure_on_ranks(options)
    else:
        for name in SHOWN if options.command == "all" else [options.command]:
            measure(name, options)
    return 0


if __name__ == "__main__":
    if not {"checkpoint", "export", "large", "load"}.intersection(sys.argv[1:2]):  # these measure memory
        keep_freed_memory()
    sys.exit(main())
