"""The short forms of four over six, which the CUDA kernels use, against its formulas; both on the CPU."""

from __future__ import annotations

from ctypes import byref, c_int, c_int64, c_uint32, c_uint64

import pytest
import torch
from native import build

SEEDS = [pytest.param(0), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))]
QUICK = pytest.param(1 << 16, id="bfloat16")
DENSE = pytest.param(257, marks=pytest.mark.slow, id="dense")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = build("four_over_six", torch.device("cpu"), tmp_path_factory.mktemp("native"))
    for name in ("quotients", "decoded", "candidates", "blocks"):
        getattr(library, f"compare_{name}").restype = c_int64
    return library


def test_quotients_of_all_mantissas(library):
    """By 6 and by both divisors of errors. Powers of two change no rounding of normal floats, so that two of
    them, at both ends, stand for all.
    """
    assert library.compare_quotients(-110, 2, 230) == 0


@pytest.mark.parametrize("step", [QUICK, DENSE])
def test_decoded_values_of_all_scales(library, step):
    """Of all codes under all scale bytes, with every amax that is a bfloat16."""
    assert library.compare_decoded(c_uint32(0), c_uint32(step)) == 0


@pytest.mark.parametrize("step", [pytest.param(65521, id="sparse"), DENSE])
def test_scales_of_any_block(library, step):
    assert library.compare_candidates(c_uint64(1), c_int64(200), c_uint32(step)) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "count"), [(1, 1 << 20), (16, 1 << 16)], ids=["blocks", "tiles"])
def test_codes_and_scales(library, rows, count, seed):
    """Of drawn blocks and tiles of any values and amaxes, with both maxima and both errors."""
    taken = c_int64()
    assert library.compare_blocks(c_uint64(seed), c_int64(count), c_int(rows), byref(taken)) == 0
    assert count // 2 < taken.value < count, "blocks with a short form, and others"
