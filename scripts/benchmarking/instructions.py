"""Counts what the rows of scripts/bench.py execute, by Nsight Compute, for the budgets of budgets.py."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarking.budgets import bounds
from benchmarking.launches import MARK, SIZE
from benchmarking.session import provenance, save

COUNTS = {
    "instructions": "smsp__inst_executed.sum",
    "alu": "smsp__inst_executed_pipe_alu.sum",
    "fma": "smsp__inst_executed_pipe_fma.sum",
    "fmaheavy": "smsp__inst_executed_pipe_fmaheavy.sum",
    "lsu": "smsp__inst_executed_pipe_lsu.sum",
    "xu": "smsp__inst_executed_pipe_xu.sum",
}
"""Of warps. fma has fmaheavy in it, the half that multiplies integers too; xu converts between types."""

PERCENTAGES = {
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
DURATION = "gpu__time_duration.sum"
METRICS = (*COUNTS.values(), *PERCENTAGES.values(), DURATION)

WARP = 32
OURS = "zerofp4"  # the namespace of every kernel of ours
LAST_LINES = 20


class CountError(RuntimeError):
    """The instructions cannot be counted here."""


class Kernel(NamedTuple):
    """A launch, and by metric what ncu says of it; what it does not say is left out."""

    name: str
    values: dict[str, float]


def count(folder: Path) -> tuple[Path, dict]:
    """Write <folder>/instructions_cuda.json; returns its path and content. Raises CountError where there is
    no ncu or no GPU, and with the last lines of what ncu said where that fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountError("ncu of Nsight Compute is not on PATH")
    if not torch.cuda.is_available():
        raise CountError("torch sees no GPU")
    known = known_metrics(ncu)
    metrics = [metric for metric in METRICS if metric.partition(".")[0] in known]
    if COUNTS["instructions"] not in metrics:
        raise CountError(f"ncu --query-metrics does not list {COUNTS['instructions'].partition('.')[0]}")
    print(f"counting {len(metrics)} metrics of every row at {SIZE} x {SIZE} ... ", flush=True)
    calls, report = profile(ncu, metrics)
    device = torch.cuda.get_device_name()
    rows, remarks = rows_of(calls, kernels_of(report), device)
    for remark in remarks:
        print(remark)
    result = {
        "benchmark": "instructions",
        "device": device,
        "ncu": version_of(ncu),
        **provenance(is_cuda=True),
    }
    result |= {"settings": {"size": SIZE}, "remarks": remarks, "rows": rows}
    return save(result, folder, "cuda"), result


# ncu


def run(command: list[str], **options) -> str:
    """What it prints. Raises CountError with the last of it if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise CountError(f"ncu failed: {last_lines(done.stdout)}")
    return done.stdout


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def version_of(ncu: str) -> str:
    return last_lines(run([ncu, "--version"])).splitlines()[-1]


def known_metrics(ncu: str) -> set[str]:
    """The names that this GPU has, less what follows their first dot. Asked for others ncu counts nothing."""
    return {line.split()[0] for line in run([ncu, "--query-metrics"]).splitlines() if line.strip()}


def profile(ncu: str, metrics: list[str]) -> tuple[list[dict], str]:
    """The calls that were made, and what ncu saw as CSV."""
    with tempfile.TemporaryDirectory() as scratch:
        calls, report = Path(scratch, "calls.json"), Path(scratch, "counts.ncu-rep")
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
        )
        which = ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{OURS}|{MARK}"]
        how = ["--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(metrics)]
        what = [sys.executable, "-m", "benchmarking.launches", str(calls)]
        said = run(
            [ncu, *how, *which, "--export", str(report), *what], env={**os.environ, "PYTHONPATH": path}
        )
        if not (report.exists() and calls.exists()):
            raise CountError(f"ncu wrote no report: {last_lines(said)}")
        shown = run([ncu, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"])
        return json.loads(calls.read_text()), shown


# Its report


def kernels_of(report: str) -> list[Kernel]:
    """The launches in their order, of a raw page as CSV: a header, units, and a line for each."""
    lines = report.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise CountError(f"ncu's report has no header: {last_lines(report) or 'it is empty'}")
    found = [line for line in csv.DictReader(lines[header:]) if (line["ID"] or "").isdigit()]
    found.sort(key=lambda line: int(line["ID"]))
    return [Kernel(line["Kernel Name"], values_of(line)) for line in found]


def values_of(line: dict[str, str]) -> dict[str, float]:
    values = {}
    for metric in METRICS:
        try:
            values[metric] = float((line.get(metric) or "").replace(",", ""))
        except ValueError:  # n/a, or not there at all
            continue
    return values


def rows_of(calls: list[dict], kernels: list[Kernel], device: str) -> tuple[list[dict], list[str]]:
    """A row for each call that launched kernels of ours, and remarks on what is missing."""
    by_call: list[list[Kernel]] = []
    for kernel in kernels:
        if MARK in kernel.name:
            by_call.append([])
        elif by_call:
            by_call[-1].append(kernel)
    if len(by_call) != len(calls):
        raise CountError(f"{len(calls)} calls were made, ncu saw {len(by_call)}")
    rows = [row_of(call, own, device) for call, own in zip(calls, by_call, strict=True) if own]
    lacking = [metric for metric in METRICS if any(metric not in kernel.values for kernel in kernels)]
    remarks = [f"not counted, or not for every kernel: {metric}" for metric in lacking]
    strangers = [call["name"] for call, own in zip(calls, by_call, strict=True) if not own]
    return rows, remarks + [f"{name} launches no kernel of ours" for name in strangers]


def row_of(call: dict, kernels: list[Kernel], device: str) -> dict:
    """Counts by the element, and percentages over the time of all kernels. A figure that ncu did not give for
    every kernel is None.
    """
    row = {**call, "kernels": [kernel.name for kernel in kernels]}
    for name, metric in COUNTS.items():
        warps = total(kernel.values.get(metric) for kernel in kernels)
        row[name] = None if warps is None else warps * WARP / call["elements"]
    known = [row[name] for name in ("instructions", "alu", "fma")]
    row["other"] = None if None in known else known[0] - known[1] - known[2]
    times = [kernel.values.get(DURATION) for kernel in kernels]
    for name, metric in PERCENTAGES.items():
        row[name] = mean([kernel.values.get(metric) for kernel in kernels], times)
    row["bounds"] = {
        limit: {"ms": seconds * 1e3, "gbps": call["bytes"] / seconds / 1e9}
        for limit, seconds in bounds(row, call["elements"], device)
        if seconds
    }
    return row


def total(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return None if None in values else sum(values)


def mean(values: list[float | None], weights: list[float | None]) -> float | None:
    """Over the weights, without which only a single value has a mean."""
    if len(values) == 1:
        return values[0]
    if None in values or None in weights or not sum(weights):
        return None
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
