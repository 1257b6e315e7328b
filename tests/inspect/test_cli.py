"""zerofp4: its options, and what `info` says of installations that there are none of here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from early import waits_for

import zerofp4
from zerofp4.inspect import info, main
from zerofp4.inspect.info import mpi_library
from zerofp4.ops import check_capability

ARCHITECTURES = ["sm_80", "sm_90", "sm_100f", "sm_120f", "compute_90"]


@pytest.fixture(autouse=True)
def no_mpi_is_asked(monkeypatch):
    """It takes a process."""
    monkeypatch.setattr(info, "mpi_library", lambda: "MPI of a test")


def built_for(monkeypatch, architectures, *devices, unusable=None):
    """The extension was compiled for these architectures, and torch sees these GPUs: (name, capability)."""
    gpus = [{"name": name, "capability": capability, "usable": True} for name, capability in devices]
    cuda = {"compiled": bool(architectures), "version": "13.0", "architectures": architectures}
    cuda["products"] = "cuBLASLt 13.1.0"
    build = {"cpu": {"compiled": ["baseline"], "running": "baseline"}, "cuda": cuda | {"devices": gpus}}

    def check(index):
        if unusable is not None:
            raise RuntimeError(unusable)
        check_capability(f"cuda:{index} ({devices[index][0]})", devices[index][1], architectures)

    monkeypatch.setattr(info, "build_info", lambda: build)
    monkeypatch.setattr(info, "check_cuda", check)


def shown(capsys, *arguments) -> tuple[int, str]:
    """The exit status, and what was printed, with one space between columns."""
    code = main(["info", *arguments])
    return code, re.sub(" {2,}", " ", capsys.readouterr().out)


def version(_):
    command = [sys.executable, "-m", "zerofp4", "--version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.heavy
@waits_for(version)
def test_the_module_runs(early):
    run = early(version)
    assert (run.returncode, run.stdout) == (0, f"zerofp4 {zerofp4.__version__}\n"), run.stderr


# An editable installation finds the extension wherever Python runs.
_NOT_EDITABLE = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
runpy.run_module("zerofp4", run_name="__main__")
"""


def in_the_sources(folder):
    """python -m zerofp4 info, where the package lies without its extension, which is installed elsewhere."""
    package = Path(zerofp4.__file__).parent
    shutil.copytree(package, folder / "zerofp4", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", _NOT_EDITABLE, "info"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.heavy
@waits_for(in_the_sources)
def test_sources_that_shadow_the_installation(early):
    run = early(in_the_sources)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and last.startswith("ModuleNotFoundError: zerofp4._C, a compiled extension")
    shadowed = f"this source folder shadows the installation in {Path(zerofp4.__file__).parent}: "
    assert f"{shadowed}install with -e, or run Python in another folder" in last


def into_a_closed_pipe(folder):
    """zerofp4 inspect of enough tensors for a write before the end, to a reader that takes one line."""
    torch.save({f"layers.{i}.weight": torch.zeros(2, 4) for i in range(2000)}, folder / "m.pt")
    command = f"{sys.executable} -m zerofp4 inspect {folder / 'm.pt'} | head -1; echo ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)


@pytest.mark.heavy
@waits_for(into_a_closed_pipe)
def test_a_closed_pipe_is_no_error(early):
    run = early(into_a_closed_pipe)
    first, code = run.stdout.splitlines()
    assert first.split() == ["tensor", "kind", "shape", "bytes", "amax"] and code == "0"
    assert run.stderr == ""


def test_info_of_this_machine(capsys):
    code, text = shown(capsys)
    problems = [line for line in text.splitlines() if line.startswith("problem: ")]
    assert code == (1 if problems else 0)
    running = zerofp4.build_info()["cpu"]["running"]
    assert f"CPU kernels {running}, out of " in text
    assert f"torch {torch.__version__}, " in text
    assert "MPI of a test" in text or "no mpi4py" in text


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ((), "in each dtype"),
        ((torch.float16,), "of float16 in float32: this CPU has no instructions for it"),
        (
            (torch.bfloat16, torch.float16),
            "of bfloat16 and float16 in float32: this CPU has no instructions for it",
        ),
    ],
)
def test_what_the_cpu_multiplies(monkeypatch, capsys, slow, expected):
    monkeypatch.setattr(info, "SLOW_ON_CPU", slow)
    assert f"\nCPU products {expected}\n" in shown(capsys)[1]


def test_json_is_what_collect_returns(capsys):
    _, text = shown(capsys, "--json")
    assert json.loads(text) == json.loads(json.dumps(info.collect()))
    assert list(json.loads(text)) == [
        *("zerofp4", "python", "platform", "torch", "cpu", "cuda", "gpus"),
        *("distributed", "environment", "problems"),
    ]


def test_variables_that_are_set_are_shown(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("CXX", raising=False)
    _, text = shown(capsys)
    assert "OMP_NUM_THREADS '3' (threads of operations on the CPU)" in text
    assert "CXX not set (" in text


def test_gpus_that_can_run(monkeypatch, capsys):
    built_for(monkeypatch, ARCHITECTURES, ("H200", (9, 0)), ("B200", (10, 0)), ("later", (11, 0)))
    code, text = shown(capsys)
    assert code == 0 and text.endswith("\nno problem found\n")
    assert "GPU 0 H200, compute capability 9.0: runs sm_90\n" in text
    assert "GPU 1 B200, compute capability 10.0: runs sm_100f\n" in text
    assert "GPU 2 later, compute capability 11.0: runs compute_90\n" in text


def test_a_gpu_that_the_package_refuses_is_a_problem(monkeypatch, capsys):
    built_for(monkeypatch, [], ("H200", (9, 0)), unusable="zerofp4 was built without CUDA")
    code, text = shown(capsys)
    assert code == 1
    assert "CUDA kernels not compiled in\n" in text
    assert text.endswith("\nproblem: GPU 0 cannot be used: zerofp4 was built without CUDA\n")


def test_a_gpu_that_there_is_no_code_for_is_a_problem(monkeypatch, capsys):
    built_for(monkeypatch, ["sm_90", "compute_90"], ("A100", (8, 0)))
    code, text = shown(capsys, "--json")
    (gpu,) = json.loads(text)["gpus"]
    assert code == 1 and gpu["usable"] is False and gpu["code"] is None
    assert gpu["reason"] == (
        "zerofp4 was built for sm_90, compute_90, cuda:0 (A100) has 8.0: reinstall it on this machine, or "
        "with ZEROFP4_CUDA_ARCHS=all"
    )


def test_an_instruction_set_that_is_not_there_is_a_problem(monkeypatch, capsys):
    def refuse():
        raise RuntimeError("ZEROFP4_CPU_ISA: this build runs baseline on this processor, not 'neon'")

    monkeypatch.setattr(info, "build_info", refuse)
    code, text = shown(capsys)
    assert code == 1
    assert "CPU kernels none, out of none\n" in text
    assert "problem: RuntimeError: ZEROFP4_CPU_ISA: this build runs baseline" in text


def test_a_torch_without_process_groups(monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    _, text = shown(capsys)
    assert "process groups none: this torch was built without torch.distributed\n" in text


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("MPICH Version:\t4.2.3\nMPICH Release date: ...\n", "MPICH Version: 4.2.3"),
        ("Open MPI v4.1.4, package: Debian", "Open MPI v4.1.4"),
        ("", None),
    ],
)
def test_the_mpi_library_is_named_in_short(monkeypatch, output, expected):
    monkeypatch.setattr(info.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=output))
    assert mpi_library() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["inform"], "argument COMMAND: invalid choice: 'inform'"),
        (["info", "--js"], "unrecognized arguments: --js"),
        (["inspect"], "the following arguments are required: CHECKPOINT"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["info"], ["inspect"], ["memory"], ["blackwell-check"]])
def test_help_says_what_the_exit_codes_mean(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    assert "  1  done, and something was found wrong" in capsys.readouterr().out
