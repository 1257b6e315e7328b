"""What a type checker says to somebody who uses the package."""

import ast
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from early import waits_for

import zerofp4

ROOT = Path(__file__).parents[2]
CALLER = ROOT / "tests" / "typing" / "uses_public_names.py"


def run(*command: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    for name in ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):  # it is to be alone
        environment.pop(name, None)
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def check(_) -> subprocess.CompletedProcess:
    return run("-m", "mypy")


def call(_) -> subprocess.CompletedProcess:
    return run(str(CALLER))


@pytest.mark.heavy
@pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install mypy"
)
@waits_for(check)
def test_mypy_accepts_a_caller_of_every_public_name(early):
    checked = early(check)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.heavy
@waits_for(call)
def test_the_caller_runs(early):
    finished = early(call)
    assert finished.returncode == 0, finished.stderr


def test_the_caller_uses_every_public_name():
    tree = ast.parse(CALLER.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    public = {*zerofp4.__all__, *zerofp4.optim.__all__, *zerofp4.nn.__all__}
    public |= {"init_process_group", "destroy_process_group"}
    assert public <= used, f"not in {CALLER.name}: {sorted(public - used)}"


def test_the_package_says_that_it_has_types():
    assert (Path(zerofp4.__file__).parent / "py.typed").exists()
