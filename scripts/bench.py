#!/usr/bin/env python3
"""Measures the stages of a cast against the copy ceiling and against torch.compile of the reference.

    scripts/bench.py local_step                 the stages on one weight, on the GPU if there is one
    scripts/bench.py local_step --device cpu --size 4096 --threads 2
    scripts/bench.py readme                     write the tables of README.md from benchmarks/results

Times are medians of many runs after a warm-up, in one process; percentages are of a device-to-device copy
measured in that process (bytes read plus bytes written over time). Every run writes
benchmarks/results/NAME.json.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import zerofp4
from zerofp4 import reference
from zerofp4.layout import ceil_div

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}


class Bench:
    """Measures on one device and collects rows."""

    def __init__(self, name: str, device: torch.device, repeats: int):
        self.name, self.device, self.repeats = name, device, repeats
        self.rows: list[dict] = []
        self.copy_gbps = self._measure_copy()

    def seconds(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of one call, after three that are not counted."""
        for _ in range(3):
            run()
        measure = self._cuda_seconds if self.device.type == "cuda" else self._cpu_seconds
        return statistics.median(measure(run) for _ in range(repeats or self.repeats))

    def _cuda_seconds(self, run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _cpu_seconds(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def _measure_copy(self) -> float:
        half = COPY_BYTES[self.device.type] // 2
        source, target = (
            torch.randint(256, (half,), dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        return 2 * half / self.seconds(lambda: target.copy_(source)) / 1e9

    def row(self, name: str, run: Callable[[], object], moved: float, rule: str, **extra) -> float:
        """Measure and add a row; `moved` bytes by `rule`. Returns milliseconds."""
        ms = self.seconds(run, extra.pop("repeats", None)) * 1e3
        gbps = moved / ms / 1e6
        row = {"name": name, "ms": ms, "gbps": gbps, "percent_of_copy": 100 * gbps / self.copy_gbps}
        self.rows.append(row | {"target": None, "bytes": moved, "rule": rule} | extra)
        print(
            f"{name:34} {ms:9.3f} ms {gbps:8.1f} GB/s {row['percent_of_copy']:6.1f}% of copy   {rule}",
            flush=True,
        )
        return ms

    def save(self) -> Path:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        is_cuda = self.device.type == "cuda"
        content = {
            "benchmark": self.name,
            "device": torch.cuda.get_device_name(self.device) if is_cuda else processor(),
            "threads": None if is_cuda else torch.get_num_threads(),
            "versions": {
                "zerofp4": zerofp4.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "build": zerofp4.build_info()["cuda"]["version"]
                if is_cuda
                else zerofp4.build_info()["cpu"]["running"],
            },
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "copy_gbps": self.copy_gbps,
            "rows": self.rows,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def processor() -> str:
    names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The commit being measured: from git, or from GIT_COMMIT where the checkout came without its history."""
    run = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else os.environ.get("GIT_COMMIT")


def local_step(args: argparse.Namespace) -> None:
    """Every stage on one square bfloat16 weight that this process owns whole, and the reference."""
    device = torch.device(args.device)
    bench = Bench(f"local_step_{args.device}_{args.size}", device, args.repeats)
    print(f"copy ceiling {bench.copy_gbps:.1f} GB/s")
    n, size = args.size * args.size, args.size
    master = torch.randn(n, device=device)
    weight = zerofp4.empty((size, size), device=device)
    plan = zerofp4.CastPlan([weight], [master], [0])
    stages, tiles = plan._stages, ceil_div(size, 16) ** 2
    bench.row(f"amax/{size}", lambda: (stages.begin(), stages.amax()), 4 * n + 8 * tiles, "4n + 8 tiles")
    bench.row(f"scale/{size}", stages.scale, 6 * tiles, "6 tiles (both compact scales)")
    bench.row(f"cast/{size}", stages.cast, 4.5 * n + 4 * tiles, "4.5n + 4 tiles")
    ours = bench.row(f"local_step/{size}", plan.step, 8.5 * n + 18 * tiles, "8.5n + 18 tiles")
    bench.row(f"transpose/{size}", plan.post, n, "n")
    values = weight.dequantize()
    bench.row(f"dequantize/{size}", weight.dequantize, 2.5 * n + tiles, "2.5n + tiles")
    bench.row(
        f"quantize_2d/{size}",
        lambda: zerofp4.quantize(values, columnwise=True),
        5.5 * n,
        "2 reads of bf16 + 1.5n",
    )
    if args.peers:
        peers(bench, master.view(size, size), ours)
    print(bench.save())


def peers(bench: Bench, master: torch.Tensor, ours: float) -> None:
    """The reference, eager and compiled: codes, scales and amax of the same master, one tensor, nothing
    sharded.
    """

    def cast(master: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = master.bfloat16()
        amax = reference.magnitude(x).amax().reshape(1)
        scale = reference.block_scale(reference.block_amax(x, 16), amax)
        return reference.pack(reference.encode(x, scale, amax, 16)), scale, amax

    moved, rule = 4.5 * master.numel(), "bytes in and out, once"
    for name, function in (("eager", cast), ("compile", torch.compile(cast))):
        ms = bench.row(
            f"reference_{name}/{len(master)}", lambda f=function: f(master), moved, rule, repeats=7
        )
        bench.rows[-1]["times_ours"] = ms / ours
        print(f"    {ms / ours:.2f} times local_step")


def table(path: Path) -> str:
    """A result file as a Markdown table."""
    result = json.loads(path.read_text())
    where = result["device"] + (f", {result['threads']} threads" if result["threads"] else "")
    lines = [f"{where}: copy ceiling {result['copy_gbps']:,.0f} GB/s (`{path.relative_to(ROOT)}`).", ""]
    lines += ["| operation | ms | GB/s | % of copy | bytes counted |", "|---|---:|---:|---:|---|"]
    for row in result["rows"]:
        figures = f"{row['ms']:.3f} | {row['gbps']:,.0f} | {row['percent_of_copy']:.0f}"
        lines.append(f"| {row['name']} | {figures} | {row['rule']} |")
    return "\n".join(lines)


def readme_section() -> str:
    return "\n\n".join(table(path) for path in sorted(RESULTS.glob("*.json"), reverse=True))


def readme(_: argparse.Namespace) -> None:
    """Replace what stands between the benchmark markers of README.md."""
    path = ROOT / "README.md"
    begin, end = "<!-- benchmarks: begin -->\n", "\n<!-- benchmarks: end -->"
    head, rest = path.read_text().split(begin)
    path.write_text(head + begin + readme_section() + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("local_step", help=local_step.__doc__, description=local_step.__doc__)
    step.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    step.add_argument(
        "--size", type=int, default=16384, help="rows and columns of the weight, even (default 16384)"
    )
    step.add_argument("--repeats", type=int, default=50, help="runs per median (default 50)")
    step.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    step.add_argument("--no-peers", dest="peers", action="store_false", help="leave the reference out")
    step.set_defaults(run=local_step)
    commands.add_parser("readme", help=readme.__doc__).set_defaults(run=readme)
    args = parser.parse_args()
    if args.command == "local_step":
        if args.size < 2 or args.size % 2 or args.repeats < 1:
            parser.error("--size must be even and at least 2, --repeats at least 1")
        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no GPU")
        if args.threads:
            torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    sys.exit(main())
