"""One measured operation on one device: its clock, rows as they come, and the result file that they make."""

import collections
import ctypes
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import zerofp4
from benchmarks.rules import KINDS, Moved, target_of
from benchmarks.workloads import ROOT

RESULTS = ROOT / "benchmarks" / "results"

COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
CPU_FLUSH_BYTES = 256 << 20
WARM_UP = 3
FEWEST_RUNS, SECONDS_PER_ROW = 5, 5.0
PROFILED_RUNS = 10
SPIN_CYCLES_PER_SECOND = 3e9  # more than a GPU's clock: it spins for longer than the host takes
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
HOST_CALLS, HOST_ROUNDS = 20, 15  # 80 launches in flight: far from what makes a launch wait

Run = Callable[[], object]


def keep_freed_memory() -> None:
    """As torch's allocator does on a GPU: else page faults take most of a call that returns large tensors."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


class Clock:
    """Times calls on one device.

    A run that moves less than `flush_bytes` (four times the L2 of a GPU) is preceded by an untimed write of
    that many bytes: it starts with a cold cache, full of lines that it must write back.

    On a GPU all runs are queued before any is waited for, and ahead of each the GPU spins for longer than the
    host takes to launch it: in a training step that is hidden behind other work.
    """

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        self.is_cuda = device.type == "cuda"
        properties = torch.cuda.get_device_properties(device) if self.is_cuda else None
        self.flush_bytes = 4 * properties.L2_cache_size if properties else CPU_FLUSH_BYTES
        self._flushed = torch.empty(self.flush_bytes, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Run, moved: float) -> tuple[float, int]:
        """Median time of one call, which moves so many bytes, and the number of calls it is the median of."""
        is_cold = moved < self.flush_bytes
        for _ in range(WARM_UP):
            self.synchronize()
            begin = time.perf_counter()
            run()
            launched = time.perf_counter() - begin
            self.synchronize()
            once = time.perf_counter() - begin
        runs = min(self.repeats, max(FEWEST_RUNS, int(SECONDS_PER_ROW / max(once, 1e-9))))
        times = []
        if not self.is_cuda:
            for _ in range(runs):
                self._flush(is_cold)
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
            return statistics.median(times), runs
        for _ in range(runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush(is_cold)
            torch.cuda._sleep(int(launched * SPIN_CYCLES_PER_SECOND))
            begin.record()
            run()
            end.record()
            times.append((begin, end))
        self.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1e3, runs

    def _flush(self, is_cold: bool) -> None:
        if is_cold:
            self._flushed.fill_(1)

    def copy_gbps(self) -> float:
        """The ceiling: bytes read plus bytes written by a copy within the device's memory, over its time."""
        size = COPY_BYTES[self.device.type]
        source, target = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        source.view(torch.int64).random_()  # by words: bytes one at a time would take a CPU seconds
        return 2 * size / self.seconds(lambda: target.copy_(source), 2 * size)[0] / 1e9

    def host_us(self, run: Run) -> float:
        """Median microseconds that a call keeps the host, a few at a time. A CPU's work is part of them."""
        times = []
        run()
        while len(times) < min(HOST_ROUNDS, self.repeats) and sum(times) < SECONDS_PER_ROW:
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                run()
            times.append(time.perf_counter() - begin)
        self.synchronize()
        return statistics.median(times) / HOST_CALLS * 1e6

    def kernels(self, run: Run, runs: int = 1, moved: float = math.inf) -> dict[str, list[float]]:
        """By name the seconds of each kernel, copy and memory set of so many calls; none on a CPU."""
        found = collections.defaultdict(list)
        if not self.is_cuda:
            return found
        run()
        for _ in range(2):  # the first trace of a process may begin too late
            self.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                for _ in range(runs):
                    self._flush(moved < self.flush_bytes)
                    run()
                self.synchronize()
        for event in trace.events():
            if event.device_type == DeviceType.CUDA:
                found[event.name].append(event.time_range.elapsed_us() / 1e6)
        return found


class Session:
    """Collects the rows of one operation between two measurements of the copy ceiling."""

    def __init__(self, benchmark: str, device: torch.device, repeats: int):
        self.benchmark, self.device = benchmark, device
        self.clock = Clock(device, repeats)
        self.device_name = torch.cuda.get_device_name(device) if self.clock.is_cuda else processor()
        self.rows: list[dict] = []
        self.copy_before = self.clock.copy_gbps()
        print(f"\n{benchmark}: copy ceiling {self.copy_before:,.1f} GB/s", flush=True)

    def time(self, name: str, run: Run, moved: Moved) -> dict:
        """Time `run` and add a row, which is returned."""
        return self._add_time(name, *self.clock.seconds(run, moved.bytes), moved)

    def time_kernels(self, run: Run, parts: Mapping[str, tuple[str, Moved]]) -> None:
        """Add rows of single kernels of a call, as a profile has them. parts: by the name of a row, a word in
        the kernel's name, and what it moves. One that is not seen is said to be left out.
        """
        moved = sum(part.bytes for _, part in parts.values())
        kernels = self.clock.kernels(run, PROFILED_RUNS, moved)
        for name, (word, part) in parts.items():
            times = [times for kernel, times in kernels.items() if word in kernel]
            if len(times) == 1:
                self._add_time(name, statistics.median(times[0]), PROFILED_RUNS, part)
            else:
                self.say(f"{name} is left out: {len(times)} kernels are called {word}")

    def _add_time(self, name: str, seconds: float, runs: int, moved: Moved) -> dict:
        row = {"name": name, "ms": seconds * 1e3, "gbps": moved.bytes / seconds / 1e9}
        row |= self._target(name, "percent_of_copy")
        row |= {"bytes": moved.bytes, "elements": moved.elements, "rule": moved.rule, "runs": runs}
        set_percentage(row, self.copy_before)
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

    def host(self, name: str, run: Run, rule: str, less: float = 0.0, **extra) -> None:
        """Add the host time of a call, less so many microseconds."""
        self.count(name, "host_us", self.clock.host_us(run) - less, rule, **extra)

    def launches(self, name: str, run: Run) -> None:
        """Add the number of kernels of one call, on a GPU."""
        if self.clock.is_cuda:
            kernels = {kernel: len(times) for kernel, times in self.clock.kernels(run).items()}
            rule = "kernels, copies and memory sets of one call"
            self.count(name, "launches", sum(kernels.values()), rule, kernels=kernels)

    def say(self, line: str) -> None:
        print(line, flush=True)

    def _target(self, name: str, kind: str) -> dict:
        """Targets are those of a GPU."""
        found = target_of(self.benchmark, name, kind)
        return found if self.clock.is_cuda else {"kind": kind, "target": None}

    def result(self, settings: dict) -> dict:
        """Measure the ceiling again and return what the result file holds; percentages are of the higher."""
        after = self.clock.copy_gbps()
        ceiling = max(self.copy_before, after)
        for row in self.rows:
            if "gbps" in row:
                set_percentage(row, ceiling)
        build = zerofp4.build_info()
        return {
            "benchmark": self.benchmark,
            "device": self.device_name,
            "host": processor(),
            "threads": None if self.clock.is_cuda else torch.get_num_threads(),
            "versions": {
                "zerofp4": zerofp4.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "build": build["cuda"]["version"] if self.clock.is_cuda else build["cpu"]["running"],
            },
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "settings": settings,
            "flush_bytes": self.clock.flush_bytes,
            "copy_gbps": ceiling,
            "copy_gbps_before": self.copy_before,
            "copy_gbps_after": after,
            "rows": self.rows,
        }


def set_percentage(row: dict, ceiling: float) -> None:
    row["percent_of_copy"] = 100 * row["gbps"] / ceiling


def save(result: dict, folder: Path) -> Path:
    """Write <folder>/<benchmark>_<cuda or cpu>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['benchmark']}_{device_type(result)}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def device_type(result: dict) -> str:
    return "cuda" if result["threads"] is None else "cpu"


def processor() -> str:
    information = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", information.read_text()) if information.exists() else []
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The commit being measured: from git, or from GIT_COMMIT where the checkout came without its history."""
    run = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else os.environ.get("GIT_COMMIT")
