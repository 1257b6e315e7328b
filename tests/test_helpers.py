"""The assertions that every other test leans on must themselves fail when they should."""

import pytest
import torch
from helpers import assert_bytes_equal, assert_values_equal, first_difference


def test_equal_bytes_pass():
    for tensor in (
        torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        torch.tensor([0.5, float("nan")]),
        torch.tensor(1.5),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).t(),
    ):
        assert_bytes_equal(tensor, tensor.clone(), "tensor")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.zeros(2), torch.zeros(3), "shape (2,), expected (3,)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtype torch.float32, expected torch.int32"),
        (
            torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8),
            torch.tensor([[1, 2], [7, 0xFF]], dtype=torch.uint8),
            "2 of 4 elements differ, the first at [1, 0]: 0x03, expected 0x07",
        ),
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            "1 of 1 elements differ, the first at [0]: 0x00000000 (0.0), expected 0x80000000 (-0.0)",
        ),
        (
            torch.tensor(448.0).to(torch.float8_e4m3fn),
            torch.tensor(1.0).to(torch.float8_e4m3fn),
            "1 of 1 elements differ, the first at []: 0x7e (448.0), expected 0x38 (1.0)",
        ),
    ],
)
def test_first_difference_names_it(actual, expected, message):
    assert first_difference(actual, expected) == message
    with pytest.raises(AssertionError, match="codes: "):
        assert_bytes_equal(actual, expected, "codes")


def test_a_transposed_view_is_compared_by_coordinates():
    base = torch.zeros(2, 3, dtype=torch.uint8)
    other = base.clone()
    other[1, 2] = 9
    assert first_difference(base.t(), other.t()) == (
        "1 of 6 elements differ, the first at [2, 1]: 0x00, expected 0x09"
    )


def test_only_the_bits_of_nan_do_not_count_as_values():
    nan = float("nan")
    assert_values_equal(torch.tensor([0.0, nan]), torch.tensor([0.0, -nan]), "NaN")
    with pytest.raises(AssertionError, match="zero: 1 of 2 elements"):
        assert_values_equal(torch.tensor([0.0, nan]), torch.tensor([-0.0, -nan]), "zero")
    with pytest.raises(AssertionError, match="one NaN: 1 of 2 elements"):
        assert_values_equal(torch.tensor([0.0, nan]), torch.tensor([0.0, 1.0]), "one NaN")
