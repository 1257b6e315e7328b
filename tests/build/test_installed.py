"""README's installation, pasted where nothing is installed, and what it left, used outside of the checkout.

All other tests run a developer's installation, which is editable.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from cases.docs import blocks
from early import waits_for

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CI = os.environ.get("CI") == "true"
NOT_TRACKED = {".git", ".venv", "build", "dist", "runs", "site"}
CHECKS = """
import pathlib, sys
assert pathlib.Path(zerofp4.__file__).is_relative_to(sys.prefix), zerofp4.__file__
"""
MODULES = """
import importlib, pathlib, pkgutil, sys, zerofp4
assert pathlib.Path(zerofp4.__file__).is_relative_to(sys.prefix), zerofp4.__file__
for module in pkgutil.walk_packages(zerofp4.__path__, "zerofp4."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("zerofp4"), error  # but what a framework has that is not here
package = pathlib.Path(zerofp4.__file__).parent
files = (path.relative_to(package.parent) for path in package.rglob("*"))
print(*sorted(str(path) for path in files if path.suffix in (".py", ".typed")))
"""


def copy(target: Path) -> None:
    """The checkout, as a clone has it."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        at_the_top = NOT_TRACKED if Path(folder) == ROOT else set()
        built = re.compile(r"__pycache__|\..*_cache|.*\.(so|egg-info)")
        return [name for name in names if name in at_the_top or built.fullmatch(name)]

    shutil.copytree(ROOT, target, ignore=left_out)


def run(folder: Path, *command: object, cwd: str, **more: str) -> subprocess.CompletedProcess:
    """In the environment in this folder; stderr is part of stdout."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("ZEROFP4_")}
    kept |= {"PATH": f"{folder}/venv/bin:{kept['PATH']}", **more}
    words = [str(word) for word in command]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(words, cwd=folder / cwd, env=kept, timeout=540, **said)


def install(folder: Path) -> tuple[Path, subprocess.CompletedProcess]:
    """Paste README's block. pip may take no torch but this environment's: others may be gigabytes."""
    copy(folder / "checkout")
    (folder / "outside").mkdir()
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (folder / "constraint").write_text(f"torch=={version('torch')}\n")
    options = {"ZEROFP4_CUDA": "0", "PIP_CONSTRAINT": str(folder / "constraint"), "PIP_COMPILE": "0"}
    options |= {} if CI else {"PIP_RETRIES": "0"}
    pasted, *_ = blocks(README, "shell")
    assert "pip install --no-build-isolation ." in pasted.code
    return folder, run(folder, "bash", "-e", "-c", pasted.code, cwd="checkout", **options)


pytestmark = [
    pytest.mark.heavy,
    waits_for(install),
    pytest.mark.skipif(
        torch.version.cuda is not None and not CI,
        reason="a torch with CUDA is gigabytes to install: for CI=true",
    ),
]


@pytest.fixture
def installed(early) -> tuple[Path, str]:
    """The folder of the environment, and what the block printed."""
    folder, pasted = early(install)
    has_torch = list(folder.glob("venv/lib/python*/site-packages/torch"))
    if pasted.returncode and not has_torch and not CI:
        pytest.skip(f"pip cannot install torch here: {re.search('ERROR: .*|$', pasted.stdout)[0]}")
    assert pasted.returncode == 0, pasted.stdout
    return folder, pasted.stdout


def test_the_block_ends_with_what_was_installed(installed):
    """In the checkout, where python -m zerofp4 would find the sources."""
    folder, printed = installed
    assert re.search(rf"^zerofp4 +\S+, in {folder}/venv/", printed, re.MULTILINE), printed
    assert printed.endswith("\nno problem found\n")


def test_the_snippet_runs(installed):
    folder, _ = installed
    (folder / "outside" / "use.py").write_text(blocks(README, "python")[0].code + CHECKS)
    ranks = run(folder, "torchrun", "--standalone", "--nproc-per-node=2", "use.py", cwd="outside")
    assert ranks.returncode == 0 and "rank 1: 8,260 bytes" in ranks.stdout, ranks.stdout


def test_an_isolated_build_says_what_to_type(installed):
    """Before it fetches a torch or compiles anything."""
    folder, _ = installed
    isolated = run(folder, "pip", "install", ".", cwd="checkout")
    if "No matching distribution found for setuptools" in isolated.stdout and not CI:
        pytest.skip("pip cannot fetch setuptools here")
    assert isolated.returncode != 0
    assert ", then pip install --no-build-isolation ." in isolated.stdout, isolated.stdout


def test_the_demo_runs_in_the_checkout(installed):
    """Where the sources shadow what was installed, and its objects are kept."""
    folder, _ = installed
    demo = run(folder, "scripts/demo.sh", "--steps", "2", cwd="checkout", ZEROFP4_CUDA="0")
    assert demo.returncode == 0, demo.stdout
    assert demo.stdout.endswith("DEMO PASSED\n"), demo.stdout


def test_every_file_is_there_and_can_be_imported(installed):
    folder, _ = installed
    found = run(folder, "python", "-c", MODULES, cwd="outside")
    assert found.returncode == 0, found.stdout
    files = (path.relative_to(ROOT) for path in (ROOT / "zerofp4").rglob("*"))
    expected = sorted(str(path) for path in files if path.suffix in (".py", ".typed"))
    assert found.stdout.splitlines()[-1].split() == expected
