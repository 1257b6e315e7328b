"""What a type checker says to somebody who uses the package."""

import ast
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from early import waits_for

import zerofp4

ROOT = Path(__file__).parents[2]
CALLER = ROOT / "tests" / "typing" / "uses_public_names.py"


def check(_) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "mypy"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.heavy
@pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install mypy"
)
@waits_for(check)
def test_mypy_accepts_a_caller_of_every_public_name(early):
    checked = early(check)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_caller_runs(monkeypatch):
    """Alone, and on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a launch sets it, and this takes it back
    runpy.run_path(str(CALLER), run_name="__main__")


def test_the_caller_uses_every_public_name():
    tree = ast.parse(CALLER.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    public = {*zerofp4.__all__, *zerofp4.optim.__all__, *zerofp4.nn.__all__}
    public |= {"init_process_group", "destroy_process_group"}
    assert public <= used, f"not in {CALLER.name}: {sorted(public - used)}"


def test_the_package_says_that_it_has_types():
    assert (Path(zerofp4.__file__).parent / "py.typed").exists()
