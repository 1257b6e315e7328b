"""Masters of 24 bits in two planes, which are written and read in plain torch, as kernels do it."""

import numpy as np
import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import reference
from zerofp4.engine import joined, write_master


def bits(*given) -> torch.Tensor:
    return torch.from_numpy(np.array(given, np.uint32).view(np.float32))


DRAWN = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32))
SPECIAL = bits(0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 1)
HALFWAY = bits(*(0x3F807F00 + i for i in range(512)), *(0xBF807F00 + i for i in range(512)))
"""Around the middle between two bfloat16 values."""


@pytest.mark.parametrize("values", [DRAWN, SPECIAL, HALFWAY], ids=["drawn", "special", "halfway"])
def test_masters_are_rounded_and_joined_as_specified(device, values):
    high = torch.empty(values.shape, dtype=torch.bfloat16, device=device)
    low = torch.empty(values.shape, dtype=torch.uint8, device=device)
    write_master(values, high, low)
    rounded = reference.round_master(values, torch.tensor(128))
    planes = reference.split_master(rounded)
    assert_bytes_equal(high.cpu(), planes[0], "bfloat16")
    assert_bytes_equal(low.cpu(), planes[1], "bytes")
    assert_bytes_equal(joined(high, low).cpu(), reference.join_master(*planes), "joined")
