"""Means of a host, rounded at random to bfloat16 for other hosts: bit for bit."""

import pytest
import torch
from helpers import assert_bytes_equal, poisoned_allocations

from zerofp4 import ops, reference

PIECES = [(0, 904, 512, 4), (1024, 1501, 0, 5), (2560, 8, 2**33, 6), (4096, 70_003, 2**32 - 256, 7)]
"""With gaps, a part of a last block, and numbers of more than 32 bits."""
NUMEL = 4096 + 70_016


def means(device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUMEL, generator=generator) * torch.randn(NUMEL, generator=generator).mul(20).exp2()
    special = [torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-42, 1.0]
    x[4096 : 4096 + len(special)] = torch.tensor(special)
    return x.to(device)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize(("step", "host"), [(0, 0), (2**32 - 1, 3)])
def test_equals_the_reference(device, step, host):
    x = means(device)
    expected = torch.zeros(NUMEL, dtype=torch.bfloat16)
    for begin, numel, first, number in PIECES:
        drawn = reference.wire_bytes((numel,), 2, first=first, number=number, step=step, host=host)
        own = slice(begin, begin + numel)
        expected[own] = reference.float_to_bfloat16_stochastic(x[own].cpu(), drawn)
    with poisoned_allocations():
        out = torch.empty(NUMEL, dtype=torch.bfloat16, device=device)
    ops.round_means(x, out, ops.rounded_pieces(PIECES, device), step=step, host=host)
    assert_bytes_equal(out.cpu().view(torch.int16), expected.view(torch.int16), "rounded")


@pytest.mark.cpu_kernel
def test_without_a_piece_all_is_zero(device):
    out = torch.full((256,), 7.0, dtype=torch.bfloat16, device=device)
    ops.round_means(torch.ones(256, device=device), out, ops.rounded_pieces([], device), step=0, host=0)
    assert not out.any()


@pytest.mark.parametrize("piece", [(4, 8, 0, 1), (0, 8, 4, 1)])
def test_blocks_begin_at_multiples_of_eight(piece):
    with pytest.raises(ValueError, match="multiples of 8"):
        ops.rounded_pieces([piece], torch.device("cpu"))
