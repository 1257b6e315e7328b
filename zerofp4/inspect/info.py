"""The subcommand `info`: what is installed here, and what of it this machine can run."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.ops import SLOW_ON_CPU, build_info, check_cuda, code_for, cpu_cores
from zerofp4.version import VERSION

SUMMARY = "versions, what was compiled in, and what this machine can run"
DESCRIPTION = """\
Show the versions of ZeroFP4, Python and torch; what was compiled into the extension; the CPU instruction set
that it uses, and which of the GPUs it can run on; which process groups can be made; and the environment
variables that matter. What is found wrong is listed last.
"""

ENVIRONMENT = {
    "ZEROFP4_CPU_ISA": "the CPU instruction set to use in place of the best one",
    "ZEROFP4_CUDA": "when building: 0 leaves CUDA out",
    "ZEROFP4_CUDA_ARCHS": "when building: the GPU architectures, or all, or native",
    "ZEROFP4_CUDA_OPTIMIZE": "when building: 0 hardly optimizes GPU code, to see that it compiles",
    "CUDACXX": "when building: the CUDA compiler in place of the one on the PATH",
    "CXX": "when building: the C++ compiler in place of the one on the PATH",
    "CUDA_VISIBLE_DEVICES": "the GPUs that torch sees; empty for none",
    "OMP_NUM_THREADS": "threads of operations on the CPU",
    "RANK": "set by torchrun: this process among all",
    "WORLD_SIZE": "set by torchrun: how many there are",
    "LOCAL_RANK": "set by torchrun: this process among those of its host",
    "LOCAL_WORLD_SIZE": "set by torchrun: how many there are on this host",
    "MASTER_ADDR": "where the processes meet",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo",
    "NCCL_SOCKET_IFNAME": "the network interface of NCCL",
}
"""Environment variables and their meanings."""

# In a process of its own, because importing mpi4py.MPI loads the MPI library for good.
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
_ASK_MPI_SECONDS = 30


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for programs")


def run(options: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else "\n".join(lines(facts)))
    return 1 if facts["problems"] else 0


def collect() -> dict[str, Any]:
    """All that `info` shows, for JSON. "problems" are sentences about what does not work but should."""
    problems: list[str] = []
    try:
        build = build_info()
    except Exception as error:  # whatever it is, the other facts are still worth showing
        build = {"cpu": {"compiled": [], "running": None}, "cuda": {"devices": []}}
        problems.append(f"{type(error).__name__}: {error}")
    cuda = {name: fact for name, fact in build["cuda"].items() if name != "devices"}
    slow = [str(dtype).removeprefix("torch.") for dtype in SLOW_ON_CPU]
    cpu = {"machine": platform.machine(), "cores": len(cpu_cores()), "threads": torch.get_num_threads()}
    return {
        "zerofp4": {"version": VERSION, "path": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "cpu": {**cpu, **build["cpu"], "multiplied_in_float32": slow},
        "cuda": cuda or None,
        "gpus": _gpus(build["cuda"], problems),
        "distributed": _distributed(),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "problems": problems,
    }


def _gpus(cuda: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    gpus = []
    for index, device in enumerate(cuda["devices"]):
        reason = None
        try:
            check_cuda(index)
        except RuntimeError as error:
            reason = str(error)
            problems.append(f"GPU {index} cannot be used: {reason}")
        code = None if reason else code_for(device["capability"], cuda["architectures"])
        gpus.append({"index": index, **device, "usable": reason is None, "code": code, "reason": reason})
    return gpus


def _distributed() -> dict[str, Any]:
    available = dist.is_available()
    nccl = available and dist.is_nccl_available()
    try:
        mpi4py = importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        mpi4py = None
    return {
        "available": available,
        "gloo": available and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "mpi4py": mpi4py,
        "mpi": mpi4py and mpi_library(),
        "mpirun": shutil.which("mpirun"),
    }


def mpi_library() -> str | None:
    """The name of the library that mpi4py loads, or None."""
    command = [sys.executable, "-c", _ASK_MPI]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_MPI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = re.split(r"[,\n\0]", asked.stdout.strip())[0]
    return " ".join(first.split()) or None


def lines(facts: dict[str, Any]) -> list[str]:
    cpu, cuda, torch_build, groups = (facts[name] for name in ("cpu", "cuda", "torch", "distributed"))
    slow = " and ".join(cpu["multiplied_in_float32"])
    shown = [
        ("zerofp4", f"{facts['zerofp4']['version']}, in {facts['zerofp4']['path']}"),
        ("Python", f"{facts['python']['version']}, {facts['python']['executable']}"),
        ("platform", facts["platform"]),
        ("torch", f"{torch_build['version']}, CUDA {torch_build['cuda'] or 'no'}"),
        ("CPU", f"{cpu['machine']}, {cpu['cores']} cores, {cpu['threads']} threads"),
        ("CPU kernels", f"{cpu['running'] or 'none'}, out of {', '.join(cpu['compiled']) or 'none'}"),
        (
            "CPU products",
            f"of {slow} in float32: this CPU has no instructions for it" if slow else "in each dtype",
        ),
        ("CUDA kernels", _shown_cuda(cuda)),
        ("exact products", "unknown" if cuda is None else f"on a GPU by {cuda['products']}"),
    ]
    for gpu in facts["gpus"]:
        capability, can = ".".join(map(str, gpu["capability"])), "cannot be used"
        if gpu["usable"]:
            can = f"runs {gpu['code']}"
        shown.append((f"GPU {gpu['index']}", f"{gpu['name']}, compute capability {capability}: {can}"))
    if not facts["gpus"]:
        shown.append(("GPUs", "none that torch sees"))
    if groups["available"]:
        shown += [("gloo", "yes" if groups["gloo"] else "no"), ("NCCL", groups["nccl"] or "no")]
        mpi = f"mpi4py {groups['mpi4py']}, {groups['mpi'] or 'which finds no MPI library'}"
        mpi = mpi if groups["mpi4py"] else "no mpi4py"
        shown.append(("MPI", f"{mpi}; {groups['mpirun'] or 'no mpirun on the PATH'}"))
    else:
        shown.append(("process groups", "none: this torch was built without torch.distributed"))
    width = max(map(len, [*(name for name, _ in shown), *ENVIRONMENT]))
    text = [f"{name:{width}}  {value}" for name, value in shown]
    text += ["", "environment:"]
    for name, what in ENVIRONMENT.items():
        value = facts["environment"][name]
        text.append(f"{name:{width}}  {'not set' if value is None else repr(value)} ({what})")
    problems = [f"problem: {problem}" for problem in facts["problems"]]
    return [*text, "", *(problems or ["no problem found"])]


def _shown_cuda(cuda: dict[str, Any] | None) -> str:
    if cuda is None:
        return "unknown"
    if not cuda["compiled"]:
        return "not compiled in"
    return f"for {', '.join(cuda['architectures'])}, compiled by CUDA {cuda['version']}"
