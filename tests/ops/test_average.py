"""The mean of the ranks' gradients, bit for bit."""

import pytest
import torch
from cases.ops import DTYPES, marked
from helpers import assert_values_equal, poisoned_allocations

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


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2048, 4096 + 24, 70_003])
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_rows_in_the_memory_of_ranks(device, dtype, n, ranks):
    pieces = tame(ranks, n, dtype, device)
    expected, squares, wanted = (
        torch.empty(n, device=device),
        *torch.zeros(2, *ops.SQUARES, dtype=torch.int64, device=device),
    )
    ops.average(pieces, expected, squares=wanted)
    rows = [row.clone() for row in pieces]
    with poisoned_allocations():
        out = torch.empty(n, device=device)
    rows_of_ranks = ops.PeerRows(tuple(row.data_ptr() for row in rows), n, dtype)
    ops.average(rows_of_ranks, out, squares=squares)
    assert_values_equal(out, expected, f"{ranks} x {n} {dtype}")
    assert torch.equal(squares.sum(0), wanted.sum(0))


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_memory_that_no_vector_can_be_read_from(device, offset):
    pieces = gradients(2, 4096, torch.bfloat16, device)
    moved = torch.empty(2 * 4096 + offset, dtype=torch.bfloat16, device=device)[offset:].view(2, 4096)
    moved.copy_(pieces)
    out = torch.full((4096 + 2 * offset,), 7.0, device=device)
    ops.average(moved, out[offset:-offset])
    assert_values_equal(out[offset:-offset], reference.average(pieces.cpu()).to(device), "mean")
    assert (out[:offset] == 7).all() and (out[-offset:] == 7).all()


def tame(ranks: int, n: int, dtype: torch.dtype, device) -> torch.Tensor:
    """Of many magnitudes, and finite, as are the squares."""
    return gradients(ranks, n, dtype, "cpu").nan_to_num(0, 3e4, -3e4).clamp(-3e4, 3e4).to(device)


def words_of(squares: torch.Tensor) -> torch.Tensor:
    return squares.sum(0).cpu()


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", marked("threads", [0, 1, 127, 4096, 2048 + 24, 70_003], 70_003))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_own_row_and_squares(device, dtype, n, ranks):
    """A rank's own gradients where they are, and the sums of the squares of the means."""
    pieces = tame(ranks, n, dtype, device)
    expected = reference.average(pieces.cpu())
    for rank in range(ranks):
        own, rows = pieces[rank].clone(), pieces.clone()
        rows[rank] = torch.nan  # is not read
        squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=device)
        with poisoned_allocations():
            out = torch.empty(n, device=device)
        ops.average(rows, out, own, rank, squares)
        assert_values_equal(out, expected.to(device), f"{ranks} x {n} {dtype}")
        assert words_of(squares).equal(reference.square_sums(expected))
    squares.zero_()
    ops.add_squares([out], squares)
    assert words_of(squares).equal(reference.square_sums(expected))


@pytest.mark.cpu_kernel
def test_squares_of_many_tensors(device):
    """More than travel in one launch, of several dtypes and lengths, at any address; each as if alone."""
    sizes = [0, 1, 127, 128, 300, 0, 40_003]
    tensors = []
    for i in range(280):
        dtype = DTYPES[i % 3]
        tensors.append(tame(1, sizes[i % 7] + i % 2, dtype, device)[0][i % 2 :])
    squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=device)
    ops.add_squares(tensors, squares)
    expected = sum(reference.square_sums(tensor.float().cpu()) for tensor in tensors)
    assert words_of(squares).equal(expected)
    before = squares.clone()
    ops.add_squares([], squares)
    assert squares.equal(before)


def test_squares_do_not_depend_on_how_they_are_cut(device):
    """At multiples of 128 elements, in any order."""
    values = tame(1, 70_016, torch.float32, device)[0]
    whole, parts = (torch.zeros(ops.SQUARES, dtype=torch.int64, device=device) for _ in range(2))
    ops.add_squares([values], whole)
    for first, last in ((40_960, 70_016), (128, 256), (0, 128), (256, 40_960)):
        ops.add_squares([values[first:last].contiguous()], parts)
    assert words_of(whole).equal(words_of(parts))
    norm = ops.norm_of_squares(whole.sum(0))
    torch.testing.assert_close(norm, values.double().norm().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.inf, torch.inf),
        (-torch.inf, torch.inf),
        (torch.nan, torch.nan),
        (3e19, torch.inf),
        (1e-30, 0.0),
    ],
)
def test_squares_that_are_no_numbers(device, value, expected):
    values = torch.zeros(1000, device=device)
    values[517] = value
    squares = torch.zeros(ops.SQUARES, dtype=torch.int64, device=device)
    ops.add_squares([values], squares)
    assert words_of(squares).equal(reference.square_sums(values.cpu()))
    found = ops.norm_of_squares(squares.sum(0))
    assert_values_equal(found, torch.tensor(expected, device=device), "norm")
    values[3] = torch.nan
    ops.add_squares([values], squares)
    assert ops.norm_of_squares(squares.sum(0)).isnan()
