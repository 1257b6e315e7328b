"""Shapes and index maps."""

import pytest
import torch

from zerofp4 import reference
from zerofp4.layout import as_matrix, check_matrix, scale_shape


def test_as_matrix_flattens_leading_dimensions():
    assert as_matrix((2, 3, 4)) == (6, 4)
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \(4,\)"):
        as_matrix((4,))


def test_odd_sizes_are_refused():
    check_matrix(3, 4, columnwise=False)
    with pytest.raises(ValueError, match="last dimension must be even, got 5"):
        check_matrix(4, 5, columnwise=False)
    with pytest.raises(ValueError, match="rows must be even, got 3"):
        check_matrix(3, 4, columnwise=True)


@pytest.mark.parametrize(
    ("layout", "block_rows", "expected"),
    [
        ("compact", 16, (9, 18)),
        ("compact", 1, (130, 18)),
        ("expanded", 16, (256, 20)),
        ("swizzled", 1, (256, 20)),
    ],
)
def test_scale_shape(layout, block_rows, expected):
    assert scale_shape(130, 288, block_rows, layout) == expected


def test_unknown_layout():
    with pytest.raises(ValueError, match="'tiled'"):
        scale_shape(16, 16, 16, "tiled")


def test_swizzled_scales_are_a_permutation_of_the_padded_matrix():
    rows, columns = 256, 12
    expanded = torch.arange(rows * columns, dtype=torch.int16).view(rows, columns)
    low, high = (
        reference.swizzle_scale(part.to(torch.uint8)).flatten() for part in (expanded & 0xFF, expanded >> 8)
    )
    places = (low.int() + high.int() * 256).argsort().view(rows, columns)
    assert sorted(places.flatten().tolist()) == list(range(rows * columns))
    # The corners of an atom: 4 bytes of a row together, rows 32 apart in one 16-byte group.
    corners = [(0, 3), (32, 0), (1, 0), (0, 4), (128, 0)]
    assert [places[corner].item() for corner in corners] == [3, 4, 16, 512, 1536]
