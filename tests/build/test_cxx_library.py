"""zerofp4._autograd takes the C++ library that torch has loaded, not a second one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest
from cases import builds

pytest.importorskip("pybind11")

SOURCE = """
#include <sstream>
extern "C" __attribute__((visibility("default"))) int size_of_text(long value) {
    std::ostringstream out;
    out << "item " << value;
    return static_cast<int>(out.str().size());
}
"""
CALL = "import ctypes, sys, torch; print(ctypes.CDLL(sys.argv[1]).size_of_text(ctypes.c_long(5)))"


@pytest.mark.heavy
def test_streams_work_where_a_compiler_prefers_a_static_library(tmp_path):
    """Linked as the extension is, of other sources."""
    builds.configure(tmp_path, ZEROFP4_CUDA="0", LDFLAGS="-static-libstdc++")
    (tmp_path / "all_autograd.cpp").write_text(SOURCE)
    library = f"_autograd{sysconfig.get_config_var('EXT_SUFFIX')}"
    builds.ninja(tmp_path, library)
    call = [sys.executable, "-c", CALL, str(tmp_path / library)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == (str(len("item 5")), 0), done.stderr
