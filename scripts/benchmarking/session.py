"""One measured operation: its rows as they come, and the result file they make."""

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

import zerofp4
from benchmarking.clock import Clock
from benchmarking.rules import Moved
from benchmarking.targets import KINDS, target_of

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Session:
    """Collects the rows of one operation between two measurements of the copy ceiling.

    with_profile: every timed row also says what it launches and how long it keeps the host.
    """

    def __init__(self, benchmark: str, device: torch.device, repeats: int, with_profile: bool):
        self.benchmark, self.device, self.with_profile = benchmark, device, with_profile
        self.clock = Clock(device, repeats)
        self.device_name = torch.cuda.get_device_name(device) if self.clock.is_cuda else processor()
        self.rows: list[dict] = []
        self.copy_before = self.clock.copy_gbps()
        print(f"\n{benchmark}: copy ceiling {self.copy_before:,.1f} GB/s", flush=True)

    def time(
        self,
        name: str,
        run: Callable[[], object],
        moved: Moved,
        *,
        before: Callable[[], object] | None = None,
    ) -> dict:
        """Time `run` and add a row, which is returned. before: done before each run, not timed."""
        seconds, runs = self.clock.seconds(run, moved.bytes, before)
        row = {"name": name, "ms": seconds * 1e3, "gbps": moved.bytes / seconds / 1e9}
        row |= self._target(name, "percent_of_copy")
        row |= {"bytes": moved.bytes, "elements": moved.elements, "rule": moved.rule, "runs": runs}
        set_percentage(row, self.copy_before)
        if self.with_profile:
            row["host_us"] = self.clock.host_us(run)
            row["kernels"] = self.clock.kernels(run)
            row["launches"] = sum(row["kernels"].values()) if self.clock.is_cuda else None
        self.rows.append(row)
        figures = f"{row['ms']:9.3f} ms {row['gbps']:8.1f} GB/s {row['percent_of_copy']:6.1f}% of copy"
        print(f"{name:38}{figures}   {moved.rule}", flush=True)
        return row

    def count(self, name: str, kind: str, value: float, rule: str, **extra) -> None:
        """Add a row of a figure that is no time over bytes."""
        self.rows.append({"name": name, kind: value} | self._target(name, kind) | {"rule": rule} | extra)
        print(f"{name:38}{KINDS[kind].show(value):>20}   {rule}", flush=True)

    def ratio(self, name: str, kind: str, over: dict, under: dict) -> None:
        """Add the time of one row over that of another."""
        rule = f"time of {over['name']} over that of {under['name']}"
        self.count(name, kind, over["ms"] / under["ms"], rule)

    def compare(self, ours: dict, peer: dict) -> float:
        """How many times our time the peer takes, noted in its row."""
        peer["times_ours"] = peer["ms"] / ours["ms"]
        self.say(f"    {peer['name']} takes {peer['times_ours']:.2f} times {ours['name']}")
        return peer["times_ours"]

    def launches(self, name: str, run: Callable[[], object]) -> None:
        """Add the number of kernels of one call, on a GPU."""
        kernels = self.clock.kernels(run)
        rule = "kernels, copies and memory sets of one call"
        self.count(name, "launches", sum(kernels.values()), rule, kernels=kernels)

    def say(self, line: str) -> None:
        print(line, flush=True)

    def _target(self, name: str, kind: str) -> dict:
        """Targets are those of a GPU."""
        return target_of(name, kind) if self.clock.is_cuda else {"kind": kind, "target": None}

    def result(self, settings: dict) -> dict:
        """Measure the ceiling again and return what the result file holds; percentages are of the higher."""
        after = self.clock.copy_gbps()
        ceiling = max(self.copy_before, after)
        for row in self.rows:
            if "gbps" in row:
                set_percentage(row, ceiling)
        return {
            "benchmark": self.benchmark,
            "device": self.device_name,
            "threads": None if self.clock.is_cuda else torch.get_num_threads(),
            **provenance(self.clock.is_cuda),
            "settings": settings,
            "flush_bytes": self.clock.flush_bytes,
            "copy_gbps": ceiling,
            "copy_gbps_before": self.copy_before,
            "copy_gbps_after": after,
            "rows": self.rows,
        }


def provenance(is_cuda: bool) -> dict:
    """What a result file says of what was measured, and when."""
    build = zerofp4.build_info()
    return {
        "versions": {
            "zerofp4": zerofp4.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "build": build["cuda"]["version"] if is_cuda else build["cpu"]["running"],
        },
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def set_percentage(row: dict, ceiling: float) -> None:
    row["percent_of_copy"] = 100 * row["gbps"] / ceiling


def save(result: dict, folder: Path, device_type: str) -> Path:
    """Write <folder>/<benchmark>_<device type>.json, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}_{device_type}.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(scratch, path)
    return path


def processor() -> str:
    information = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", information.read_text()) if information.exists() else []
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The commit being measured: from git, or from GIT_COMMIT where the checkout came without its history."""
    run = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else os.environ.get("GIT_COMMIT")
