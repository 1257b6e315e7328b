"""The sanitizers of scripts/test.sh --sanitize are at work: what they must find ends a process."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "libasan" not in os.environ.get("LD_PRELOAD", ""), reason="run with scripts/test.sh --sanitize"
)

# Dequantizes 16 x 128 elements of MXFP8 into memory for `elements` floats, `shift` bytes from its begin.
PROGRAM = """
import torch
import zerofp4._C as _C

data, scale = torch.zeros(16 * 128, dtype=torch.uint8), torch.zeros(16 * 4, dtype=torch.uint8)
out = torch.empty({elements} * 4 + {shift}, dtype=torch.uint8)
words = data.data_ptr(), scale.data_ptr(), out.data_ptr() + {shift}, 16, 128, False, 0
_C.Mxfp8DequantizeList(True, words, 0).run(_C.Target(-1, 0, 1))
print("the end")
"""


def run(folder, elements=16 * 128, shift=0):
    """In another folder, since Python would import zerofp4 from the checkout."""
    program = PROGRAM.format(elements=elements, shift=shift)
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)


def test_enough_memory(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_too_little_memory_ends_the_process(tmp_path):
    died = run(tmp_path, elements=16 * 128 - 1)
    assert died.returncode != 0 and "the end" not in died.stdout
    assert "AddressSanitizer: heap-buffer-overflow" in died.stderr
    assert "dequantize" in died.stderr


def test_undefined_behaviour_ends_the_process(tmp_path):
    died = run(tmp_path, shift=1)
    assert died.returncode != 0 and "the end" not in died.stdout
    assert "runtime error:" in died.stderr and "misaligned address" in died.stderr
