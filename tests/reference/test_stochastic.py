"""Stochastic rounding of the specification: its random bytes and its probabilities."""

import itertools
from fractions import Fraction

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import reference
from zerofp4.format import E2M1_VALUES

BYTES = torch.arange(256, dtype=torch.uint8)
INTERVALS = list(enumerate(itertools.pairwise(E2M1_VALUES)))


# Random bytes


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(device, counter, key, expected):
    """The vectors that Random123 publishes in its kat_vectors."""
    counter, key = ([torch.tensor([word], device=device) for word in words] for words in (counter, key))
    assert tuple(word.item() for word in reference.philox(counter, key)) == expected


def test_bytes_are_those_of_the_element_whatever_the_shape():
    state = torch.tensor([2**62 + 12345, 2**31 + 7])
    whole = reference.random_bytes(state, (1000,), 1)
    assert_bytes_equal(reference.random_bytes(state, (7, 13), 1).flatten(), whole[:91], "first elements")
    seed, offset = [torch.tensor([word]) for word in (12345, 2**30)], torch.tensor([2**31 + 7])
    words = reference.philox((torch.tensor([5]), torch.tensor([0]), offset, torch.tensor([1])), seed)
    expected = b"".join(word.item().to_bytes(4, "little") for word in words)
    assert bytes(whole[80:96].tolist()) == expected


def test_seed_offset_and_stream_give_other_bytes():
    states = [(0, 0), (1, 0), (-1, 0), (1 << 32, 0), (0, 1), (0, -1)]
    draws = {
        bytes(reference.random_bytes(torch.tensor(state), (16,), stream).tolist())
        for state in states
        for stream in (reference.ROWWISE_STREAM, reference.COLUMNWISE_STREAM)
    }
    assert len(draws) == 2 * len(states)


def test_same_bytes_on_every_device(device):
    state = torch.tensor([-3, 9])
    actual = reference.random_bytes(state.to(device), (33, 35), 0)
    assert_bytes_equal(actual.cpu(), reference.random_bytes(state, (33, 35), 0), "bytes")


# Rounding


def bytes_that_round_up(values: torch.Tensor, code: int) -> torch.Tensor:
    """How many of the 256 bytes take each value to code + 1; the others must take it to `code`."""
    codes = reference.float_to_e2m1_stochastic(values.unsqueeze(1), BYTES)
    assert ((codes == code) | (codes == code + 1)).all()
    negative = reference.float_to_e2m1_stochastic(-values.unsqueeze(1), BYTES)
    assert_bytes_equal(negative, codes + 8, "negative values")
    return (codes == code + 1).sum(1)


def half_up(value: float, low: float, high: float) -> int:
    fraction = (Fraction(value) - Fraction(low)) / (Fraction(high) - Fraction(low))
    return int(256 * fraction + Fraction(1, 2))


@pytest.mark.parametrize(("code", "interval"), INTERVALS)
def test_probability_is_exact_on_every_interval(code, interval):
    """256 f rounded half up out of 256 bytes; from 1/4 on also for the neighbours of where that changes."""
    low, high = interval
    values = low + (high - low) * torch.arange(4096) / 4096
    edges = values[8::16]  # where 256 f is a whole number and a half
    if low == 0:
        edges = edges[edges > 0.25]
    beside = [torch.nextafter(edges, torch.full_like(edges, towards)) for towards in (low, high)]
    values = torch.cat([values, *beside])
    expected = [half_up(value, low, high) for value in values.tolist()]
    assert bytes_that_round_up(values, code).tolist() == expected


def test_probability_below_a_quarter_misses_the_float32_sum_by_its_rounding():
    values = torch.rand(2000, generator=torch.Generator().manual_seed(0)) / 4
    count = bytes_that_round_up(values, 0).tolist()
    allowed = [{half_up(v, 0, 0.5), half_up(v + 2**-26, 0, 0.5)} for v in values.tolist()]
    assert all(n in near for n, near in zip(count, allowed, strict=True))
    assert bytes_that_round_up(torch.tensor([0.0, 1e-45, 1e-30]), 0).tolist() == [0, 0, 0]


def test_grid_values_stay_and_large_ones_saturate():
    grid = torch.tensor(E2M1_VALUES).unsqueeze(1)
    codes = reference.float_to_e2m1_stochastic(grid, BYTES)
    assert_bytes_equal(codes, torch.arange(8, dtype=torch.uint8).unsqueeze(1).expand(8, 256), "grid")
    large = torch.tensor([6.0, 6.5, 1e30, torch.inf, torch.nan, -torch.nan]).unsqueeze(1)
    assert (reference.float_to_e2m1_stochastic(large, BYTES) == 7).all()
    assert (reference.float_to_e2m1_stochastic(-large[:4], BYTES) == 15).all()
    assert (reference.float_to_e2m1_stochastic(torch.tensor(-0.0), BYTES) == 8).all()


# Whole tensors


def stochastic_codes(x: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, state, stream) -> torch.Tensor:
    """Each element on its own, with the byte of its place in the stored orientation."""
    y = x.float() * reference.spread(reference.block_encode(scale, amax), 1, *x.shape)
    r = reference.random_bytes(state, (x.numel(),), stream).view(x.shape)
    return reference.float_to_e2m1_stochastic(y, r)


@pytest.mark.parametrize("hadamard", [False, True])
def test_element_takes_the_byte_of_its_place_in_the_stored_orientation(device, hadamard):
    state = torch.tensor([42, 3])
    x = torch.randn(38, 46).bfloat16()
    q = reference.quantize(x.to(device), 1, rng_state=state.to(device), hadamard=hadamard)
    q = reference.Quantized(*(buffer.cpu() for buffer in q))
    nearest = reference.quantize(x, 1, hadamard=hadamard)
    assert_bytes_equal(q.rowwise_scale, nearest.rowwise_scale, "scales do not depend on the rounding")
    expected = stochastic_codes(x, q.rowwise_scale, q.amax, state, 0)
    assert_bytes_equal(reference.unpack(q.rowwise_data), expected, "rowwise")
    transposed = (reference.hadamard_transform(x) if hadamard else x).t().contiguous()
    expected = stochastic_codes(transposed, q.columnwise_scale, q.columnwise_amax, state, 1)
    assert_bytes_equal(reference.unpack(q.columnwise_data), expected, "columnwise")
    assert not torch.equal(q.rowwise_data, nearest.rowwise_data)


def test_tiles_transpose_exactly_under_stochastic_rounding():
    q = reference.quantize(torch.randn(38, 46), 16, rng_state=torch.tensor([42, 3]))
    assert_bytes_equal(q.columnwise_data, reference.transpose_packed(q.rowwise_data), "columnwise")
