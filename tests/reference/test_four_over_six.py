"""The choice of scales under four over six."""

import numpy as np
import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import FourOverSix, reference
from zerofp4.format import E2M1_VALUES, FLOAT32_MAX

CHOICES = [FourOverSix(e4m3_max, error) for e4m3_max in (448, 256) for error in ("mae", "mse")]
f32 = np.float32


def e4m3(value: np.float32) -> np.float32:
    return f32(torch.tensor([min(value, f32(448))]).to(torch.float8_e4m3fn).float().item())


def e2m1(value: np.float32) -> np.float32:
    """Nearest of the eight magnitudes, the even code of two."""
    near = [(abs(abs(float(value)) - magnitude), i % 2, i) for i, magnitude in enumerate(E2M1_VALUES)]
    return f32(np.copysign(E2M1_VALUES[min(near)[2]], value))


def tile_error(tile, scale, amax, encode_scale, choice) -> np.float32:
    """One scalar operation after the other, as NUMERICS.md has them."""
    decode = f32(1) / encode_scale
    encode = min(f32(1) / (scale * decode), f32(FLOAT32_MAX)) if scale > 0 else f32(FLOAT32_MAX)
    sums = []
    for row in tile:
        total = f32(0)
        for x in row:
            d = ((e2m1(x * encode) * scale) * amax) / f32(6 * choice.e4m3_max) - x
            total = total + (abs(d) if choice.error == "mae" else d * d)
        sums.append(total)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def choose(tile: np.ndarray, amax: np.float32, choice: FourOverSix) -> np.float32:
    encode_scale = min(f32(choice.e4m3_max * 6) / amax, f32(FLOAT32_MAX))
    base = (np.abs(tile).max() / f32(6)) * encode_scale
    six, four = e4m3(base), e4m3(base * f32(1.5))
    errors = [tile_error(tile, scale, amax, encode_scale, choice) for scale in (six, four)]
    return four if errors[1] < errors[0] else six


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_scales_equal_the_scalar_formulas(device, choice, block_rows, spread):
    generator = torch.Generator().manual_seed(0)
    exponents = spread * torch.randn(32, 64, generator=generator)
    x = torch.randn(32, 64, generator=generator) * exponents.exp2()
    x[0, 32:48] = 0
    q = reference.quantize(x.to(device), block_rows, four_over_six=choice)
    tiles = reference.blocks(x, block_rows).numpy()
    expected = [[choose(tile, f32(x.abs().max()), choice) for tile in row] for row in tiles]
    assert_bytes_equal(q.rowwise_scale.cpu().float(), torch.tensor(np.array(expected)), "scales")


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_equal_errors_take_the_map_to_six_and_smaller_ones_the_map_to_four(error):
    x = torch.zeros(2, 16)
    x[0, 0] = 6  # exact under both maps
    x[1, :2] = torch.tensor([6, 4.5])  # 4.5 is 3 under the map to 4, and between 4 and 6 under the other
    q = reference.quantize(x, 1, four_over_six=FourOverSix(256, error))
    assert q.rowwise_scale.float().tolist() == [[256.0], [384.0]]
    values = reference.dequantize(q.rowwise_data, q.rowwise_scale, q.amax, 1, e4m3_max=256)
    assert_bytes_equal(values, x, "values")


@pytest.mark.parametrize("choice", CHOICES)
def test_codes_are_those_of_the_chosen_scale(choice):
    x = torch.randn(34, 46)
    q = reference.quantize(x, 1, four_over_six=choice)
    encode = reference.block_encode(q.rowwise_scale, q.amax, choice.e4m3_max)
    codes = reference.float_to_e2m1(x * reference.spread(encode, 1, *x.shape))
    assert_bytes_equal(reference.unpack(q.rowwise_data), codes, "codes")


@pytest.mark.parametrize("choice", CHOICES)
def test_columnwise_copies(choice):
    x = torch.randn(34, 46)
    q = reference.quantize(x, 1, four_over_six=choice)
    transposed = reference.quantize(x.t(), 1, four_over_six=choice)
    assert_bytes_equal(q.columnwise_data, transposed.rowwise_data, "1D data")
    assert_bytes_equal(q.columnwise_scale, transposed.rowwise_scale, "1D scale")
    tiles = reference.quantize(x, 16, four_over_six=choice)
    assert_bytes_equal(tiles.columnwise_data, reference.transpose_packed(tiles.rowwise_data), "2D data")
    assert_bytes_equal(tiles.columnwise_scale, tiles.rowwise_scale.t().contiguous(), "2D scale")


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_nonfinite_tensors_take_the_map_to_six(value, block_rows):
    x = torch.randn(16, 40)
    x[3, 20] = value
    q = reference.quantize(x, block_rows, four_over_six=FourOverSix())
    six, _ = reference.scale_candidates(reference.block_amax(x, block_rows), q.amax, 256)
    assert q.amax.item() == torch.inf
    assert_bytes_equal(q.rowwise_scale, six, "scales")


def test_options_out_of_their_range_are_refused():
    assert FourOverSix() == FourOverSix(256, "mae")
    with pytest.raises(ValueError, match="e4m3_max must be 448 or 256, got 300"):
        FourOverSix(300)
    with pytest.raises(ValueError, match="error must be 'mae' or 'mse', got 'max'"):
        FourOverSix(error="max")
