#!/usr/bin/env python3
"""Measures operations against the copy ceiling and against what others do, and shows the results.

    scripts/bench.py all                        everything that the pages show, on the GPU if there is one
    scripts/bench.py local_step                 one operation, over every workload it has
    scripts/bench.py local_step --workload square --size 4096 --device cpu --threads 2
    scripts/bench.py adamw --scale 16           the lists of weights, 16 times smaller
    scripts/bench.py transpose --profile        with kernels and host time of every row
    scripts/bench.py quantize --no-peers        without what others do, the compiled reference above all
    torchrun --nproc-per-node 2 scripts/bench.py step, or without torchrun
                                                a whole optimizer step, a rank for each GPU
    scripts/bench.py checkpoint --scale 4 --storage tmpfs, or under torchrun
                                                dcp.save and dcp.load beside DTensors of the same bytes
    torchrun --nproc-per-node 2 scripts/bench.py fsdp2
                                                training steps of fully_shard, gathered in 4 bits and in bf16
    torchrun --nproc-per-node 2 scripts/bench.py megatron
                                                Megatron-Core's update and gather, NVFP4 beside its own bf16
    scripts/bench.py instructions               what rows execute, counted by ncu, for budgets in the tables
    scripts/bench.py docs                       charts and the tables of docs/performance.md from the results

Workloads: `square` is one bf16 weight of SIZE x SIZE, owned whole, in rows named by its size. `llama3-8b` are
the 224 weights of Llama-3-8B's layers; the process owns what rank 1 of 4 owns when the flat buffer of the
whole model is cut into equal slices. `2000-small` are 2,000 weights of 768x768, 256x2880 and 256x2872,
each owned from an odd element. `te-3011` are the shapes of TransformerEngine's pull request of that number,
`268mb-scales` a matrix whose scales of 1x16 blocks are 268 MB, `64-groups` 64 matrices of 4096x2048.

Times are medians after a warm-up; percentages are of a device-to-device copy measured in the same process
before and after (the higher of both), bytes read plus bytes written over time. Each row says how its bytes
were counted. An operation writes OUTPUT/<operation>_<device>.json, and the bar chart of all results there.

Others are torch's own ways, and torchao, gemlite and fouroversix where they can be imported: installed, or
below a folder on PYTHONPATH. One that is absent or fails is said to be, and left out.

`instructions` has Nsight Compute (ncu on PATH) count what each row executes in one call at 8192 x 8192, lists
4 times smaller, and writes OUTPUT/instructions_cuda.json. Tables then say of a row, for example, "33
instructions (16 ALU, 12 FMA): at most 61% by issue": so many by the element, of them so many for the units
for integers and logic and for those that multiply; at 61% of the copy the schedulers issue in every cycle.
"""

import argparse
import gc
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarking import chart, growth, instructions, tables
from benchmarking.checkpoints import checkpoint
from benchmarking.clock import keep_freed_memory
from benchmarking.fsdp2 import fsdp2
from benchmarking.megatron import megatron
from benchmarking.operations import OPERATIONS, SHOWN
from benchmarking.session import RESULTS, Session, save
from benchmarking.steps import step
from benchmarking.timer import only_rank_0_speaks
from benchmarking.workloads import NAMES

from zerofp4.format import SCALE_LAYOUTS
from zerofp4.launch import destroy_process_group, init_process_group

SIZES = {"cuda": 16384, "cpu": 4096}
SCALES = {"cuda": 1, "cpu": 16}


def at_least(smallest: int):
    """A type for argparse: integers from `smallest` on."""

    def convert(value: str) -> int:
        if int(value) < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        return int(value)

    convert.__name__ = "int"  # argparse names it when the value is no number
    return convert


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, (run, workloads, has_layouts) in OPERATIONS.items():
        summary = run.__doc__.splitlines()[0]
        add_options(add_command(commands, name, summary), workloads, has_layouts)
    summary = f"{', '.join(SHOWN[:-1])} and {SHOWN[-1]}, a result file each"
    add_options(add_command(commands, "all", summary), tuple(NAMES))
    add_step_options(add_command(commands, "step", step.__doc__.splitlines()[0]))
    summary, *more = inspect.cleandoc(checkpoint.__doc__).splitlines()
    add_checkpoint_options(add_command(commands, "checkpoint", summary, "\n".join(more)))
    add_fsdp2_options(add_command(commands, "fsdp2", fsdp2.__doc__.splitlines()[0]))
    add_megatron_options(add_command(commands, "megatron", megatron.__doc__.splitlines()[0]))
    add_output(add_command(commands, "instructions", "have ncu count what the rows execute on a GPU"))
    summary = "write the charts, and the tables of docs/performance.md, from the results"
    add_docs_options(add_command(commands, "docs", summary))
    options = parser.parse_args(arguments)
    if options.command not in ("docs", "instructions", "step", "checkpoint", "fsdp2", "megatron"):
        complete(options, parser)
    return options


def add_command(commands, name: str, summary: str, more: str = "") -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter if more else argparse.HelpFormatter
    description = f"{summary}\n{more}" if more else summary
    return commands.add_parser(
        name, help=summary, description=description, allow_abbrev=False, formatter_class=kind
    )


def add_options(
    parser: argparse.ArgumentParser, workloads: tuple[str, ...], has_layouts: bool = True
) -> None:
    add = parser.add_argument
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cuda", "cpu"], default=default, help=f"default here: {default}")
    names = ", ".join(workloads)
    add("--workload", action="append", choices=workloads, help=f"may be repeated (default: {names})")
    if "square" in workloads:
        add("--size", type=at_least(2), help="rows and columns of `square`, even (default: 16384, CPU 4096)")
    else:
        parser.set_defaults(size=None)
    help_of_scale = "divides the length of 2000-small and the dimensions of other lists (default: 1, CPU 16)"
    add("--scale", type=at_least(1), help=help_of_scale)
    if has_layouts:
        help_of_layouts = "scale buffers that the weights have (default: compact, which is always there)"
        add("--scale-layouts", nargs="+", choices=SCALE_LAYOUTS, default=["compact"], help=help_of_layouts)
    else:
        parser.set_defaults(scale_layouts=["compact"])
    add("--repeats", type=at_least(1), default=50, help="runs per median, fewer of long ones (default: 50)")
    add("--threads", type=at_least(1), help="threads on the CPU (default: torch's)")
    add("--no-peers", dest="peers", action="store_false", help="leave out what others do")
    add("--profile", action="store_true", help="also count kernels and take the host time of every row")
    add_output(parser)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scale", type=at_least(1), help="divides the dimensions of the weights (default: 1, CPU 64)")
    add("--repeats", type=at_least(1), default=20, help="steps per median (default: 20)")
    add("--bucket-mb", type=float, help="of ZeroFP4Optimizer (default: its own)")
    add(
        "--transport",
        nargs="+",
        choices=("collective", "peer"),
        default=["collective"],
        help="of ZeroFP4Optimizer, one or both (default: collective)",
    )
    add("--timeline", action="store_true", help="also draw what rank 0's GPU does when in a step")
    add_output(parser)


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scale", type=at_least(1), help="divides the dimensions of the weights (default: 2, CPU 64)")
    add("--repeats", type=at_least(1), default=3, help="saves and loads per median (default: 3)")
    add(
        "--storage",
        choices=["disk", "tmpfs"],
        default="disk",
        help="where temporary folders are made: in the "
        "system's folder for them, or in memory, in /dev/shm (default: disk)",
    )
    add("--folder", type=Path, help="make them in this folder instead")
    add_output(parser)


def add_fsdp2_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scale", type=at_least(1), help="divides the dimensions of the layers (default: 1, CPU 64)")
    add("--repeats", type=at_least(1), default=10, help="groups of 4 steps per median (default: 10)")
    add("--layers", type=at_least(1), help="of each model (default: 8 of Llama-3-8B's, 28 of the other)")
    add("--tokens", type=at_least(1), default=1024, help="in a rank's batch (default: 1024)")
    add_output(parser)


def add_megatron_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scale", type=at_least(1), help="divides the dimensions of the weights (default: 2, CPU 64)")
    add("--repeats", type=at_least(1), default=20, help="updates per median (default: 20)")
    add_output(parser)


def add_docs_options(parser: argparse.ArgumentParser) -> None:
    summary = "GB/s of a GPU to other hosts, assumed in what is predicted of several (default: 50)"
    default = growth.NETWORK_GBPS
    parser.add_argument("--network", type=at_least(1), default=default, metavar="GBPS", help=summary)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results"
    )


def complete(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in what depends on the device, and refuse what does not go together."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda, but torch sees no GPU")
    options.size = options.size or SIZES[options.device]
    options.scale = options.scale or SCALES[options.device]
    if options.size % 2:
        parser.error(f"argument --size: must be even, got {options.size}")
    options.scale_layouts = [name for name in SCALE_LAYOUTS if name in ("compact", *options.scale_layouts)]
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def measure(name: str, options: argparse.Namespace) -> dict:
    """Run one operation and write its result file."""
    operation = OPERATIONS[name]
    asked = options.workload or operation.workloads
    settings = {
        "workload": [workload for workload in asked if workload in operation.workloads],
        **{key: getattr(options, key) for key in ("size", "scale", "scale_layouts", "repeats")},
    }
    if not operation.has_layouts:
        settings["scale_layouts"] = ["compact"]
    chosen = argparse.Namespace(**{**vars(options), **settings})
    session = Session(name, torch.device(options.device), options.repeats, options.profile)
    operation.run(session, chosen)
    gc.collect()  # plans and weights hold one another, and the copy needs room
    result = session.result(settings)
    path = save(result, options.output, options.device)
    tables.print_tables(result)
    print(f"wrote {path}", flush=True)
    return result


_SETTINGS = ("scale", "repeats", "bucket_mb", "transport", "layers", "tokens", "storage")


def measure_on_ranks(run: Callable, options: argparse.Namespace, scale: int) -> None:
    """All ranks measure, rank 0 writes. scale: on GPUs, unless the options say another."""
    world = init_process_group()
    try:
        options.scale = options.scale or (scale if world.device.type == "cuda" else 64)
        name = f"{run.__name__}_{world.world_size}_ranks"
        with only_rank_0_speaks(world):
            session = Session(name, world.device, options.repeats, False)
            run(session, options, world)
            settings = {k: v for k, v in vars(options).items() if k in _SETTINGS}
            result = session.result(settings)
            if world.rank == 0:
                path = save(result, options.output, world.device.type)
                tables.print_tables(result)
                print(f"wrote {path}", flush=True)
                picture = chart.draw_comparison(options.output, result)
                if picture is not None:
                    print(f"wrote {picture}", flush=True)
    finally:
        destroy_process_group()


def count_instructions(folder: Path) -> int:
    """The exit code: 1 where they cannot be counted, which is said."""
    try:
        path, result = instructions.count(folder)
    except instructions.CountError as error:
        print(f"scripts/bench.py instructions: {error}", file=sys.stderr)
        return 1
    tables.print_table(tables.instructions_table(result["rows"]))
    print(f"wrote {path}")
    return 0


def draw(folder: Path, network_gbps: float = growth.NETWORK_GBPS) -> None:
    """network_gbps: what is assumed of a network between hosts."""
    results = [result for _, result in tables.load(folder)]
    charts = chart.draw(folder, results)
    if charts is None:
        print("no chart: matplotlib is not installed (the extra `train` has it)")
        return
    charts += filter(None, (chart.draw_comparison(folder, result) for result in results))
    grown = growth.growth_of(results, network_gbps)
    for path in (*charts, *([] if grown is None else [growth.draw(folder, grown)])):
        print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.command == "docs":
        draw(RESULTS, options.network)
        print(f"wrote {tables.write_docs(options.network)}")
        return 0
    if options.command == "instructions":
        return count_instructions(options.output)
    if options.command == "step":
        measure_on_ranks(step, options, 1)
        return 0
    if options.command == "fsdp2":
        measure_on_ranks(fsdp2, options, 1)
        return 0
    if options.command == "checkpoint":
        measure_on_ranks(checkpoint, options, 2)
        return 0
    if options.command == "megatron":
        measure_on_ranks(megatron, options, 2)
        return 0
    for name in SHOWN if options.command == "all" else [options.command]:
        measure(name, options)
    draw(options.output)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] != ["checkpoint"]:  # which measures memory
        keep_freed_memory()
    sys.exit(main())
