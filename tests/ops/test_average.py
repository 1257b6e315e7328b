"""zerofp4::average: the mean of the ranks' gradients, bit for bit."""

import pytest
import torch
from helpers import assert_values_equal, poisoned_allocations
from op_cases import DTYPES

from zerofp4 import ops, reference


def gradients(ranks: int, n: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Of all magnitudes, so that the order of a sum shows; with NaN, Inf and sums that overflow."""
    generator = torch.Generator().manual_seed(ranks * n)
    exponents = torch.randint(-20, 15, (ranks, n), generator=generator)
    pieces = torch.randn(ranks, n, generator=generator) * torch.exp2(exponents.float())
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, 0.0)):
        pieces[: 1 + i % ranks, i::37] = value
    return pieces.to(device, dtype)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 2048, 4096 + 24, 70_003])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_equals_the_reference(device, dtype, n, ranks):
    pieces = gradients(ranks, n, dtype, device)
    with poisoned_allocations():
        out = torch.empty(n, device=device)
    ops.average(pieces, out)
    assert_values_equal(out, reference.average(pieces.cpu()).to(device), f"{ranks} x {n} {dtype}")


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_memory_that_no_vector_can_be_read_from(device, offset):
    pieces = gradients(2, 4096, torch.bfloat16, device)
    moved = torch.empty(2 * 4096 + offset, dtype=torch.bfloat16, device=device)[offset:].view(2, 4096)
    moved.copy_(pieces)
    out = torch.full((4096 + 2 * offset,), 7.0, device=device)
    ops.average(moved, out[offset:-offset])
    assert_values_equal(out[offset:-offset], reference.average(pieces.cpu()).to(device), "mean")
    assert (out[:offset] == 7).all() and (out[-offset:] == 7).all()


@pytest.mark.threads
def test_threads():
    pieces = gradients(3, 200_001, torch.bfloat16, "cpu")
    out = torch.empty(200_001)
    ops.average(pieces, out)
    assert_values_equal(out, reference.average(pieces), "mean")


@pytest.mark.heavy
def test_opcheck(device):
    pieces, out = gradients(2, 64, torch.bfloat16, device).nan_to_num(), torch.empty(64, device=device)
    torch.library.opcheck(torch.ops.zerofp4.average.default, (pieces, out))


@pytest.mark.parametrize(
    "shape, dtype, out, error",
    [
        ((2, 8), torch.float64, (8, torch.float32), TypeError),
        ((2, 8), torch.float32, (8, torch.bfloat16), TypeError),
        ((2, 8), torch.float32, (7, torch.float32), ValueError),
        ((8,), torch.float32, (8, torch.float32), ValueError),
        ((0, 8), torch.float32, (8, torch.float32), ValueError),
    ],
)
def test_refuses(device, shape, dtype, out, error):
    pieces = torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(error, match=r"pieces|out"):
        ops.average(pieces, torch.zeros(out[0], dtype=out[1], device=device))
    with pytest.raises(ValueError, match="contiguous"):
        ops.average(torch.zeros(8, 2, device=device).t(), torch.zeros(8, device=device))
