"""Gradients between hosts: rounded without bias, by bytes that no cut and no other host changes."""

import pytest
import torch

from zerofp4 import reference
from zerofp4.reference import covering_scale, float_to_bfloat16_stochastic, float_to_e4m3_stochastic
from zerofp4.testing import assert_bytes_equal

WIRES = ("bf16", "mxfp8", "nvfp4")


def gradient(rows: int = 48, cols: int = 200) -> torch.Tensor:
    """Rows of different sizes, with zeros and values far below the rest of their blocks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    x[:, ::7] *= 1e-3
    x[3] = 0
    return x


def received(x: torch.Tensor, wire: str, step: int = 0, hosts: int = 1) -> torch.Tensor:
    sent = [reference.send_mean(x, wire, number=3, step=step, host=host) for host in range(hosts)]
    return reference.mean_of_hosts(sent, wire, x.shape[1])


def error(found: torch.Tensor, x: torch.Tensor) -> float:
    """Of its squares."""
    return ((found - x).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize(("wire", "most"), [("bf16", 6e-6), ("mxfp8", 1.4e-3), ("nvfp4", 0.022)])
def test_the_mean_of_many_steps_has_no_bias(wire, most):
    """The variance of a mean falls with the number of its terms, and a bias stays: scales of NVFP4 rounded to
    the nearest make the last number 1.8 times the other. 0.2 is the noise of 200 steps.
    """
    x, steps = gradient(), 200
    found = [received(x, wire, step) for step in range(steps)]
    once = sum(error(each, x) for each in found) / steps
    assert 0 < once < most
    assert error(torch.stack(found).mean(0), x) * steps == pytest.approx(once, rel=0.2)


@pytest.mark.parametrize("wire", WIRES)
def test_hosts_round_independently(wire):
    x = gradient()
    assert error(received(x, wire, hosts=4), x) * 4 == pytest.approx(error(received(x, wire), x), rel=0.2)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("first_row", [16, 32])
def test_slices_have_the_bytes_of_the_whole(wire, first_row):
    x = gradient()
    whole = reference.send_mean(x, wire, number=1, step=2, host=1)
    part = reference.send_mean(x[first_row:], wire, number=1, step=2, host=1, first_row=first_row)
    for field, own, cut in zip(part._fields, whole, part, strict=True):
        if own is not None:
            first = first_row // 16 if field == "amax" else first_row
            assert_bytes_equal(cut, own[first:], field)


@pytest.mark.parametrize("name", ["number", "step", "host"])
def test_other_parameters_steps_and_hosts_draw_other_bytes(name):
    where = {"first": 0, "number": 1, "step": 2, "host": 0}
    drawn = reference.wire_bytes((4, 20), 2, **where)
    other = reference.wire_bytes((4, 20), 2, **where | {name: 5})
    assert (drawn == other).float().mean() < 0.05
    assert drawn.shape == (4, 20, 2)


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_stay_zero(wire):
    assert not received(torch.zeros(17, 40), wire).any()


def test_no_element_is_above_the_largest_code():
    x = gradient().abs() + 1e-30
    amax = x.amax()
    largest = reference.block_amax(x, 1)
    scale = covering_scale(largest, amax)
    scaled = largest * reference.block_encode(scale, amax)
    assert scaled.max() <= 6 * (1 + 2**-22)
    below = (scale.view(torch.uint8) - 1).view(scale.dtype)
    assert (largest * reference.block_encode(below, amax))[scale.float() > 2**-9].min() > 6 * (1 - 2**-22)


def test_e4m3_goes_up_as_often_as_the_fraction_says():
    """Between two neighbors of each binade, also of subnormals and from one binade into the next."""
    all_bytes = torch.arange(256, dtype=torch.uint8)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    below, above = values[:-1], values[1:]
    for fraction in (0.0, 0.25, 0.5, 0.703125):
        y = below + fraction * (above - below)
        for sign in (1, -1):
            found = float_to_e4m3_stochastic((sign * y).repeat(256, 1), all_bytes[:, None]).float() * sign
            assert (found == below).logical_or(found == above).all()
            assert ((found == above).sum(0) == 256 * fraction).all()
    assert float_to_e4m3_stochastic(
        torch.tensor([448.0, -1e30]), torch.tensor([255, 255])
    ).float().tolist() == [
        448.0,
        -448.0,
    ]
    assert float_to_e4m3_stochastic(torch.tensor([torch.nan]), torch.tensor([0])).isnan().all()


def test_bfloat16_goes_up_as_often_as_the_lower_bits_count():
    drawn = torch.arange(65536)
    drawn = torch.stack([drawn & 0xFF, drawn >> 8], dim=-1).to(torch.uint8)
    for low in (0, 1, 0x8000, 0xFFFF):
        for sign in (1, -1):
            x = torch.tensor([0x3F800000 + low], dtype=torch.int32).view(torch.float32) * sign
            found = float_to_bfloat16_stochastic(x.repeat(65536), drawn).float() * sign
            assert (found == 1.0078125).sum() == low and (found == 1.0).sum() == 65536 - low
    most = torch.tensor([torch.finfo(torch.float32).max, torch.inf, -torch.inf, torch.nan])
    found = float_to_bfloat16_stochastic(most, torch.full((4, 2), 255, dtype=torch.uint8))
    assert found[:3].tolist() == [torch.finfo(torch.bfloat16).max, torch.inf, -torch.inf]
    assert found[3].isnan()
