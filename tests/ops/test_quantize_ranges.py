"""zerofp4::quantize where elements are far from what a tensor's amax and a block's scale suggest.

Every 16-bit value at every scale; scales that are rounded down far, saturate or are subnormal; values at the
ends of the range; amaxes that belong to another tensor.
"""

import math

import pytest
import torch
from cases.ops import DTYPES
from cases.quantize import MODES, check

from zerofp4 import reference
from zerofp4.format import BLOCK

HALF_DTYPES = [dtype for dtype in DTYPES if dtype.itemsize == 2]
NEAREST = {name: MODES[name] for name in ("1d", "2d", "hadamard", "hadamard, no signs")}
LARGEST_BYTE = 0x7E


AMAXES = [1e-42, 1e-30, 1e-3, 0.9, 100.0, 1e30, 2.0**126, 1e38, 3e38, torch.inf, 0.0]
"""Of another tensor."""

NOT_AMAXES = [-1.0, -torch.inf, torch.nan]


def amaxes(mode: str, value: float | None, device: torch.device) -> tuple:
    """The same amax for both copies, as far as they have one each; None: computed."""
    given = None if value is None else torch.tensor([value], device=device)
    return given, given if NEAREST[mode].get("hadamard") else None


def anchored_blocks(dtype: torch.dtype, byte: int) -> torch.Tensor:
    """Blocks [n, 16] of a tensor with amax 1 and scale byte `byte` (0 stands for 1/3): the first element sets
    the scale, the others are all values of 3 binades below it, and it, of either sign.
    """
    scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float() or torch.tensor(
        [2**-9 / 3]
    )
    largest = (scale / 448).to(dtype)
    bits = largest.view(torch.int16).item()
    per_binade = round(1 / torch.finfo(dtype).eps)
    values = torch.arange(max(bits - 3 * per_binade, 0), bits + 1, dtype=torch.int16).view(dtype)
    values = torch.cat([values, -values])
    count = -(-len(values) // (BLOCK - 1))
    padded = torch.cat([values, values.new_zeros(count * (BLOCK - 1) - len(values))])
    return torch.cat([largest.expand(count, 1), padded.view(count, BLOCK - 1)], dim=1)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_value_at_every_scale(device, dtype):
    blocks = torch.cat([anchored_blocks(dtype, byte) for byte in range(LARGEST_BYTE + 1)])
    blocks = torch.cat([blocks, blocks[-1:].expand(-len(blocks) % 128, -1)])  # 16 rows of 8 blocks
    x = blocks.reshape(-1, 8 * BLOCK).to(device)
    one = amaxes("1d", 1.0, device)
    record = check(x, NEAREST["1d"], f"{dtype} rows", one)
    assert len(record.buffer("rowwise_scale").view(torch.uint8).unique()) == LARGEST_BYTE + 1
    check(x.T.contiguous(), NEAREST["1d"], f"{dtype} columns", one)


@pytest.mark.parametrize("mode", NEAREST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", [(-24, -8), (-12, -9), (-30, 0)], ids=str)
def test_blocks_far_below_the_amax(device, exponents, dtype, mode):
    """Bytes of 0 to 3 are rounded by half and more: what a block's amax is mapped to may be 9, not 6."""
    generator = torch.Generator().manual_seed(0)
    low, high = exponents
    x = torch.randn(96, 160, generator=generator)
    tiles = torch.randint(low, high + 1, (6, 10), generator=generator).float().exp2()
    x = (x * tiles.repeat_interleave(16, 0).repeat_interleave(16, 1)).to(dtype).to(device)
    check(x, NEAREST[mode], f"{exponents} {dtype} {mode}", amaxes(mode, 1.0, device))


@pytest.mark.parametrize("mode", NEAREST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", AMAXES + NOT_AMAXES)
def test_amax_of_another_tensor(device, amax, dtype, mode):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator).to(dtype).to(device)
    check(x, NEAREST[mode], f"{amax} {dtype} {mode}", amaxes(mode, amax, device))
    if not NEAREST[mode].get("hadamard"):
        check(x, NEAREST[mode], f"{amax} {dtype} rows", amaxes(mode, amax, device), columnwise=False)


def random_patterns(dtype: torch.dtype, low: int, high: int, seed: int) -> torch.Tensor:
    """[64, 256] elements with exponents in [2^low, 2^high], of which some are 0, and zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    shape = (64, 256)
    mantissa = 1 + torch.rand(shape, generator=generator, dtype=torch.float64)
    exponent = torch.randint(low, high, shape, generator=generator).double().exp2()
    x = (mantissa * exponent * (torch.rand(shape, generator=generator) < 0.7)).clamp(
        max=torch.finfo(dtype).max
    )
    return (x * (torch.rand(shape, generator=generator) - 0.5).sign()).to(dtype)


@pytest.mark.parametrize("amax", [None, 2.0**-140, 2.0**-126, 1e-30, 1.0, 2.0**126, 3e38, torch.inf])
@pytest.mark.parametrize("mode", NEAREST)
@pytest.mark.parametrize("window", [(-133, -120), (-126, -90), (118, 128), (127, 128)], ids=str)
def test_ends_of_the_range(device, window, mode, amax):
    """The transform's sums are subnormal, or finite but infinite as bfloat16 before the last quarter."""
    x = random_patterns(torch.bfloat16, *window, seed=2).to(device)
    check(x, NEAREST[mode], f"{window} {mode} {amax}", amaxes(mode, amax, device))


@pytest.mark.parametrize("amax", [None, 1.0, 2.0**126, 1.2e38, 3e38])
def test_sums_that_only_overflow_as_bfloat16(device, amax):
    """Four times a transformed value is a finite float, but as bfloat16 it would be infinite."""
    x = torch.zeros(32, 16, dtype=torch.bfloat16)
    x[0, :] = torch.finfo(torch.bfloat16).max
    x[1, 1:8] = 2.0**119
    transformed = reference.hadamard_transform(x, random_signs=False)
    assert transformed.abs().max() == 2.0**126 > torch.finfo(torch.bfloat16).max / 4
    mode = "hadamard, no signs"
    check(x.to(device), NEAREST[mode], str(amax), amaxes(mode, amax, device))


@pytest.mark.parametrize("mode", NEAREST)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_one_that_is_not_finite_among_many(device, odd, dtype, mode):
    """Its block has a scale of 448 and all of its codes, the other blocks have theirs."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[17, 40] = odd
    if dtype.itemsize == 2 and odd != odd and math.copysign(1, odd) < 0:
        x.view(torch.int16)[17, 40] = -1  # rounding to a 16-bit dtype may drop the sign
    check(x.to(device), NEAREST[mode], f"{odd} {dtype} {mode}", amaxes(mode, 4.0, device))
