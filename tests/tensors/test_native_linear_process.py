"""zerofp4._autograd is chosen when a process imports zerofp4: its tests in one that asks for it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

IS_BUILT = importlib.util.find_spec("zerofp4._autograd") is not None


@pytest.mark.heavy
@pytest.mark.skipif(not IS_BUILT, reason="zerofp4._autograd was not built")
@pytest.mark.skipif(os.environ.get("ZEROFP4_AUTOGRAD") == "1", reason="this process runs these tests itself")
def test_the_tests_of_the_node():
    """Threads that wait for each other for ever end with the time limit."""
    tests = Path(__file__).with_name("test_native_linear.py")
    environment = os.environ | {"ZEROFP4_AUTOGRAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
