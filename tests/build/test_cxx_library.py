"""zerofp4._autograd takes the C++ library that torch has loaded, not a second one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerofp4.ops import autograd_build
from zerofp4.ops.autograd_build import FLAGS, Torch, link_flags

SOURCE = """
#include <sstream>
extern "C" __attribute__((visibility("default"))) int size_of_text(long value) {
    std::ostringstream out;
    out << "item " << value;
    return static_cast<int>(out.str().size());
}
"""
CALL = "import ctypes, sys, torch; print(ctypes.CDLL(sys.argv[1]).size_of_text(ctypes.c_long(5)))"


def test_streams_work_where_a_compiler_prefers_a_static_library(tmp_path):
    compiler = autograd_build._compiler()
    if not compiler:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "text.cpp", tmp_path / "text.so"
    source.write_text(SOURCE)
    link = link_flags(Torch(Path(torch.__file__).parent, torch.__version__))
    compiler = [*compiler, *FLAGS, "-static-libstdc++"]
    subprocess.run([*compiler, str(source), "-o", str(library), *link], check=True)
    done = subprocess.run([sys.executable, "-c", CALL, str(library)], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (str(len("item 5")), 0), done.stderr
