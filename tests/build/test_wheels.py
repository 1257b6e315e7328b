"""scripts/build_wheels.sh: its wheel has all of the package, and works where nothing else of it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("setuptools")
pytest.importorskip("pybind11")

ROOT = Path(__file__).parents[2]
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


def run(*command, **options) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"ZEROFP4_CUDA": "0", "PIP_NO_INDEX": "1"}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 540}
    done = subprocess.run([str(word) for word in command], env=environment, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.nightly
def test_a_wheel_in_a_clean_environment(tmp_path):
    """Built in a copy, since the script empties folders of the build. Only torch is this environment's."""
    checkout, clean = tmp_path / "checkout", tmp_path / "clean"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    run("bash", checkout / "scripts" / "build_wheels.sh", sys.executable)
    (wheel,) = (checkout / "dist").glob("*.whl")
    assert len(list((checkout / "dist").glob("*.tar.gz"))) == 1
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
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
    assert run(python, "-m", "zerofp4", "--version", cwd=tmp_path).startswith("zerofp4 ")
