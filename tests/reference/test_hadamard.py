"""The random Hadamard transform of the specification."""

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import reference
from zerofp4.reference.hadamard import RANDOM_SIGNS

SIGNS = torch.tensor(RANDOM_SIGNS, dtype=torch.float64)
SYLVESTER = torch.tensor(
    [[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)], dtype=torch.float64
)


def integers(rows: int, cols: int) -> torch.Tensor:
    """Small enough for every sum of 16 to be a bfloat16."""
    return torch.randint(-8, 9, (rows, cols), generator=torch.Generator().manual_seed(0)).float()


def test_signs_are_those_of_the_mask():
    assert sum((sign < 0) << i for i, sign in enumerate(RANDOM_SIGNS)) == 0xD7E8


@pytest.mark.parametrize("random_signs", [True, False])
def test_equals_the_matrix_product(device, random_signs):
    """Integers are exact; for others the butterfly's order shows, by less than the last rounding."""
    matrix = 0.25 * SYLVESTER * (SIGNS if random_signs else 1)
    x = integers(48, 40)
    expected = (matrix @ x.double().view(3, 16, 40)).view(48, 40)
    actual = reference.hadamard_transform(x.to(device), random_signs).cpu()
    assert_bytes_equal(actual, expected.bfloat16(), "integers")

    x = torch.randn(48, 40).bfloat16()
    expected = (matrix @ x.double().view(3, 16, 40)).view(48, 40)
    actual = reference.hadamard_transform(x.to(device), random_signs).cpu().double()
    # half an ulp of bfloat16, and 6 float32 roundings of sums of 16 values
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 16 * x.abs().max() * 2**-22).all()


@pytest.mark.parametrize("rows", [1, 2, 15, 17, 40])
def test_rows_past_the_end_count_as_zero(rows):
    x = torch.randn(rows, 6)
    padded = torch.zeros(-(-rows // 16) * 16, 6)
    padded[:rows] = x
    assert_bytes_equal(reference.hadamard_transform(x), reference.hadamard_transform(padded), "transform")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_input_is_rounded_to_bfloat16_first(dtype):
    x = torch.randn(32, 34).to(dtype)
    assert_bytes_equal(
        reference.hadamard_transform(x), reference.hadamard_transform(x.bfloat16()), "transform"
    )


@pytest.mark.parametrize("random_signs", [True, False])
def test_negative_zeros_give_positive_zeros(random_signs):
    zeros = torch.full((16, 4), -0.0)
    expected = torch.zeros(16, 4, dtype=torch.bfloat16)
    assert_bytes_equal(reference.hadamard_transform(zeros, random_signs), expected, "transform")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38])
def test_nonfinite_transform_has_amax_inf(value):
    """Also where only the rounding to bfloat16 overflows; the rowwise copy has the amax of x itself."""
    x = torch.ones(18, 32)
    x[17, 3] = value
    q = reference.quantize(x, 1, hadamard=True)
    assert q.columnwise_amax.item() == torch.inf
    assert q.amax.item() == (torch.tensor(3.4e38).item() if value == 3.4e38 else torch.inf)


@pytest.mark.parametrize("rows", [1, 7, 16, 34])
@pytest.mark.parametrize("random_signs", [True, False])
def test_columnwise_copy_is_that_of_the_transform(rows, random_signs):
    x = torch.randn(rows, 24).bfloat16()
    q = reference.quantize(x, 1, hadamard=True, random_signs=random_signs)
    transformed = reference.quantize(reference.hadamard_transform(x, random_signs).t(), 1)
    assert q.columnwise_data.shape == (24, -(-rows // 16) * 8)
    assert q.columnwise_scale.shape == (24, -(-rows // 16))
    assert_bytes_equal(q.columnwise_data, transformed.rowwise_data, "data")
    assert_bytes_equal(q.columnwise_scale, transformed.rowwise_scale, "scale")
    assert_bytes_equal(q.columnwise_amax, transformed.amax, "amax")
    plain = reference.quantize(x, 1)
    assert_bytes_equal(q.rowwise_data, plain.rowwise_data, "rowwise data")
    assert_bytes_equal(q.amax, plain.amax, "rowwise amax")
