"""reference/compact.py against exact arithmetic: what codes stand for, and what rounds to them."""

import math
from fractions import Fraction

import pytest
import torch
from helpers import assert_bytes_equal
from hypothesis import example, given
from hypothesis import strategies as st

from zerofp4 import reference

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
MOST = torch.finfo(torch.float32).max
SCALES = [2.0**-149, 3 * 2.0**-149, 2.0**-126, 1.7e-38, 2.0**-100, 1e-20, 1.0, 3.3, 2.0**99, 2.0**127, MOST]


def exact(y: Fraction) -> Fraction:
    """x with x (7 - 3 x) / 4 = y, to 40 digits."""
    digits = 10**40
    return (7 - Fraction(math.isqrt(int((49 - 48 * y) * digits**2)), digits)) / 6


# fma


@given(a=FLOATS, b=FLOATS, c=FLOATS)
@example(1 + 2.0**-23, 1 + 2.0**-23, 2.0**-77)
@example(1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60))
@example(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60)
@example(3.0, 2.0**-24, 1 - 2.0**-24)
def test_a_fused_multiply_add_rounds_once(a, b, c):
    """In the examples, rounding to double and then to float gives another float than rounding once."""
    a, b, c = (torch.tensor(value, dtype=torch.float32) for value in (a, b, c))
    result = reference.fma(a, b, c)
    total = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
    if abs(total) >= Fraction(MOST) + Fraction(2) ** 103:
        assert result.isinf()
        return
    below, above = (torch.nextafter(result, torch.tensor(end)) for end in (-math.inf, math.inf))
    distance = abs(Fraction(result.item()) - total)
    for other in (below, above):
        if other.isfinite():
            there = abs(Fraction(other.item()) - total)
            even = result.view(torch.int32).item() % 2 == 0
            assert distance < there or (distance == there and even)


# Masters


def test_every_master_of_24_bits_is_stored_and_comes_back():
    """Also the bfloat16 is the master rounded to nearest even, and never half way."""
    for first in range(0, 1 << 24, 1 << 20):
        bits = torch.arange(first, first + (1 << 20)) << 8
        bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int()
        bits = bits[(bits & 0x7FFFFFFF <= 0x7F800000) & (bits & 0xFF00 != 0x8000)]
        masters = bits.view(torch.float32)
        high, low = reference.split_master(masters)
        assert_bytes_equal(high, masters.bfloat16(), f"from {first:x}")
        assert_bytes_equal(reference.join_master(high, low), masters, f"from {first:x}")
        assert not (low == 0x80).any()


@pytest.mark.parametrize("value", [0x3F800000, 0x3F801200, 0x3F808100, 0x00000000, 0x80000300, 0x7F7FFF00])
def test_a_master_is_rounded_up_for_as_many_bytes_as_its_last_bits_count(value):
    """So that the mean over all bytes is the value itself, from zero and subnormals up to overflow."""
    random = torch.arange(256)
    for last in (0, 1, 77, 128, 255):
        values = torch.full((256,), value + last).sub(1 << 32 if value >> 31 else 0)
        rounded = reference.round_master(values.int().view(torch.float32), random)
        ups = rounded.view(torch.int32) & 0xFFFFFF00 != value
        assert ups.sum() == last
        assert rounded[~ups].view(torch.int32).eq(values.int()[0] - last).all()
    if value == 0x7F7FFF00:
        assert rounded[ups].eq(math.inf).all()


def test_values_between_two_bfloat16_and_what_is_not_finite():
    special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    for byte in (0, 1, 255):
        rounded = reference.round_master(special, torch.tensor(byte))
        assert rounded.tolist()[:2] == [math.inf, -math.inf]
        assert rounded.view(torch.int32)[2:].eq(0x7FC00000).all()
        high, low = reference.split_master(rounded)
        assert_bytes_equal(reference.join_master(high, low), rounded, "special")
    tie = torch.full((4,), 0x3F808000).int().view(torch.float32)
    rounded = reference.round_master(tie, torch.arange(4)).view(torch.int32)
    assert rounded.tolist() == [0x3F808100, 0x3F807F00] * 2


@pytest.mark.parametrize("high", [0x0000, 0x3F7F, 0x3F80, 0x7F7E, 0x8000, 0xBF7F, 0xBF80])
def test_the_mean_over_all_random_bytes_is_the_value(high):
    """Also of values in the middle between two bfloat16 values, and on both sides of a power of two."""
    bits = (high << 16) + torch.cat((torch.arange(0x7E00, 0x8200), torch.arange(0xFE00, 0x10200)))
    values = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    rounded = reference.round_master(values[:, None], torch.arange(256))
    assert not (reference.split_master(rounded)[1] == 0x80).any()
    error = (rounded.double() - values.double()[:, None]).mean(1)
    step = 2.0**8 * (torch.nextafter(values.abs(), torch.tensor(math.inf)).double() - values.abs().double())
    assert (error.abs() <= step / 128).all()
    is_stored = (bits & 0xFF == 0) & (bits & 0xFF00 != 0x8000)
    assert rounded[is_stored].eq(values[is_stored, None]).all()


def test_a_zero_that_somebody_writes_is_zero():
    """Whatever the byte beside it is: the master would otherwise have the bits of a NaN."""
    low = torch.arange(256, dtype=torch.uint8)
    for zero in (0.0, -0.0):
        masters = reference.join_master(torch.full((256,), zero, dtype=torch.bfloat16), low)
        assert masters[128:].eq(0).all() and masters.abs().max() < 1e-38
        assert masters.signbit().all() == (zero == 0 and math.copysign(1, zero) < 0)


def test_random_bytes_depend_on_the_logical_place_alone():
    whole = reference.master_bytes(5, 40, number=3, step=7)
    assert_bytes_equal(reference.master_bytes(2, 40, 3, 7, first_row=3), whole[3:], "rows")
    assert whole.float().mean().sub(127.5).abs() < 20
    for other in (reference.master_bytes(5, 40, 4, 7), reference.master_bytes(5, 40, 3, 8)):
        assert (whole == other).float().mean() < 0.05


# Moments


def rows_of(values: torch.Tensor, scale: float) -> torch.Tensor:
    """The values times the scale, and zeros, in rows of one group that has this scale: one of them is 1."""
    values = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    return scale * torch.cat((torch.ones(len(values), 1), values), 1)


@pytest.mark.parametrize("scale", SCALES)
def test_every_code_of_a_first_moment_stands_for_what_is_encoded_as_it(scale):
    """To a float, where subnormal numbers are so few that codes share them."""
    table = reference.code_values(127)
    m = rows_of(torch.cat((-table.flip(0), table)), scale)
    moments = reference.encode_moments(m, torch.zeros_like(m))
    assert moments.scales[..., 0].eq(scale).all()
    back = reference.decode_moments(moments)[0]
    if scale >= 2.0**-126:
        assert_bytes_equal(back, m + 0.0, f"scale {scale}")
    else:
        assert (back - m).abs().max() <= max(scale / 100, 2.0**-149)


@pytest.mark.parametrize("scale", [2.0**-74, 1e-20, 1.0, 3.3, 2.0**64])
def test_every_code_of_a_second_moment_stands_for_what_is_encoded_as_it(scale):
    """Of all roots that there are. No root is zero beside others."""
    table = reference.code_values(255)
    w = rows_of(table[1:], scale)
    moments = reference.encode_moments(torch.zeros_like(w), w)
    assert moments.scales[..., 1].eq(scale).all()
    codes = moments.exp_avg_sq.long()
    assert_bytes_equal(scale * table[codes], torch.where(w == 0, scale * table[1], w), f"scale {scale}")
    assert_bytes_equal(reference.decode_moments(moments)[1], (scale * table[codes]).square(), "squares")


def test_the_largest_has_the_largest_code_and_zero_has_zero():
    m = torch.tensor([[0.25, -3.0, 0.0, 1e-30]])
    moments = reference.encode_moments(m, m.abs())
    assert moments.exp_avg[0, 1] == -127 and moments.exp_avg[0, 2] == 0 and moments.exp_avg[0, 3] == 0
    assert moments.exp_avg_sq[0].tolist()[1:] == [255, 1, 1]
    assert moments.scales.flatten().tolist() == [3.0, 3.0]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=63))
def test_codes_are_the_nearest_of_the_parabola_and_monotone(values):
    x = torch.tensor([1.0, *sorted(values)])[None]
    moments = reference.encode_moments(x, x)
    for codes, most, least in ((moments.exp_avg, 127, 0), (moments.exp_avg_sq, 255, 1)):
        codes = codes[0].tolist()
        assert codes[1:] == sorted(codes[1:])
        for value, code in zip(x[0].tolist(), codes, strict=True):
            y = Fraction(value) * (7 - 3 * Fraction(value)) / 4 * most
            assert abs(max(y, least) - code) <= Fraction(1, 2) + Fraction(1, 1000)
            # A step of the parabola is largest at the scale, where it is 4 / most.
            back = Fraction(reference.code_values(most)[code].item())
            assert abs(back - Fraction(value)) <= Fraction(22, 10) / most


def test_what_codes_stand_for_is_the_nearest_float():
    for most in (127, 255):
        values = reference.code_values(most)
        assert values[0] == 0 and values[-1] == 1 and (values.diff() > 0).all()
        for code, value in enumerate(values.tolist()):
            error = abs(Fraction(value) - exact(Fraction(code, most)))
            assert error <= Fraction(torch.nextafter(values[code], torch.tensor(2.0)).item() - value) / 2


def test_groups_end_with_the_row():
    m = torch.ones(2, 130)
    m[1] *= 4
    m[:, 64:128] *= 2
    m[:, 128:] *= 8
    moments = reference.encode_moments(m, m)
    assert moments.scales[..., 0].tolist() == [[1, 2, 8], [4, 8, 32]]
    assert moments.exp_avg.eq(127).all() and moments.exp_avg_sq.eq(255).all()
    decoded = reference.decode_moments(moments)
    assert_bytes_equal(decoded[0], m, "exp_avg")
    assert_bytes_equal(decoded[1], m * m, "exp_avg_sq")


def test_groups_of_zeros_and_of_what_is_not_finite():
    m = torch.zeros(4, 64)
    w = torch.zeros(4, 64)
    m[1, 3], m[2, 5], w[3, 7] = math.nan, -math.inf, math.nan
    moments = reference.encode_moments(m, w)
    assert moments.scales[..., 0].flatten().tolist() == [0, math.inf, math.inf, 0]
    assert moments.scales[..., 1].flatten().tolist() == [0, 0, 0, math.inf]
    assert moments.exp_avg.eq(0).all() and moments.exp_avg_sq.eq(1).all()
    exp_avg, exp_avg_sq = reference.decode_moments(moments)
    assert exp_avg[0].eq(0).all() and exp_avg_sq[0].eq(0).all()
    assert exp_avg[1:3].isnan().all() and exp_avg_sq[3].isinf().all()


# A step

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def test_a_first_step_is_that_of_adamw_rounded():
    """No state is zeros; and a division by a reciprocal is off by little."""
    generator = torch.Generator().manual_seed(0)
    master, gradient = (torch.randn(3, 100, generator=generator) for _ in range(2))
    zeros = torch.zeros_like(master)
    expected, exp_avg, exp_avg_sq = reference.adamw_step(master, gradient, zeros, zeros, 1, **OPTIONS)
    for number in (None, 0):
        new, moments = reference.compact_adamw_step(
            master, gradient, reference.no_moments(3, 100), 1, number=number, **OPTIONS
        )
        bound = 2.0**-22 if number is None else 2.0**-14
        assert ((new - expected).abs() <= bound * expected.abs() + 2e-8).all()
        for decoded, value in zip(reference.decode_moments(moments), (exp_avg, exp_avg_sq), strict=True):
            assert ((decoded - value).abs() <= 0.06 * value.abs().max()).all()


def test_no_second_moment_vanishes_beside_a_large_one():
    """Else the element's next update would be some 30 times as large as any that AdamW makes."""
    gradient = torch.full((1, 64), 1e-7)
    gradient[0, 0] = 1.0
    master, moments = torch.zeros(1, 64), reference.no_moments(1, 64)
    for step in range(1, 6):
        before = master
        master, moments = reference.compact_adamw_step(
            master, gradient, moments, step, number=None, **OPTIONS | {"eps": 0.0, "weight_decay": 0.0}
        )
        assert (master - before).abs().max() <= 1.001 * OPTIONS["lr"]


def test_gradients_too_large_to_be_squared_leave_everything_finite():
    gradient = torch.full((1, 64), 1e-3)
    gradient[0, 0] = 1e30
    master, moments = torch.ones(1, 64), reference.no_moments(1, 64)
    for step in range(1, 4):
        master, moments = reference.compact_adamw_step(master, gradient, moments, step, **OPTIONS)
    assert master.isfinite().all() and moments.scales.isfinite().all()
