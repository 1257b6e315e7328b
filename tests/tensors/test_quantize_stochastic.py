"""zerofp4.quantize with stochastic rounding, byte for byte: which random byte an element has, which code."""

import math

import pytest
import torch
from cases.ops import DTYPES
from helpers import assert_bytes_equal
from tensor_helpers import ALL, FORMATS, assert_specified, values

import zerofp4
from zerofp4 import ops, reference
from zerofp4.format import E2M1_VALUES

STOCHASTIC = {name: options for name, options in FORMATS.items() if "four_over_six" not in options}
"""Options that stochastic rounding goes with."""
SHAPES = [(33, 48), (34, 50), (130, 272), (3, 14, 38), (6, 4, 16)]


def is_stack(x, options) -> bool:
    """Of matrices in blocks of 16x16, each of which is rounded with a state of its own."""
    return x.dim() == 3 and "block" not in options


def stochastic(x, **options):
    """A tensor with every buffer, and the state of the random numbers that it was rounded with."""
    rows = x.shape[-2] if is_stack(x, options) else x.shape[:-1].numel()
    buffers = ALL | {"columnwise": rows % 2 == 0 or options.get("hadamard", False)}
    drawn = {"stochastic_rounding": True, "generator": torch.Generator().manual_seed(7)}
    size = (len(x), 2) if is_stack(x, options) else (2,)
    state = torch.randint(2**63 - 1, size, generator=torch.Generator().manual_seed(7))
    return zerofp4.quantize(x, **buffers, **drawn, **options), state.to(x.device)


@pytest.mark.parametrize("options", STOCHASTIC.values(), ids=STOCHASTIC)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_bytes_follow_the_elements_of_the_stored_rows(device, shape, offset, dtype, options):
    """Where stored rows have no multiple of 16 elements, a block lies in two groups of random bytes.
    (ops/test_quantize has other states of the random numbers, and values of every kind.)
    """
    flat = values(math.prod(shape) + offset, device=device, dtype=dtype)
    x = flat[offset:].view(shape)
    t, state = stochastic(x, **options)
    assert_specified(t, x, rng_state=state, **options)
    sides = ["rowwise"] if t.columnwise_data is None else ["rowwise", "columnwise"]
    nearest = zerofp4.quantize(x, columnwise=len(sides) == 2, **options)
    for side in sides:
        for layout in ("expanded", "swizzled"):
            expected = getattr(nearest, f"{layout}_scale")(side == "columnwise")
            assert_bytes_equal(getattr(t, f"{side}_scale_{layout}"), expected, f"{side} scale, {layout}")


def values_beside_boundaries(r: torch.Tensor) -> torch.Tensor:
    """float32 values at, just below and just above where their random byte takes them to the next code, of
    either sign. Blocks have a 6 along either side: their scale is 1 where the tensor's amax is 2688.
    """
    generator = torch.Generator().manual_seed(1)
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    code = torch.randint(7, r.shape, generator=generator)
    boundary = grid[code + 1] - grid.diff()[code] * (2 * r.cpu().double() + 1) / 512
    rounded_up = torch.randint(2, r.shape, generator=generator) * (boundary < 0.25) * 2**-26
    x = (boundary - rounded_up).float()
    towards = torch.tensor([0.0, torch.nan, torch.inf])[torch.randint(3, r.shape, generator=generator)]
    x = torch.where(towards.isnan(), x, torch.nextafter(x, towards))
    x = x * (2 * torch.randint(2, r.shape, generator=generator) - 1)
    x[::16], x[:, ::16] = 6.0, -6.0
    return x


@pytest.mark.parametrize("seed", range(4))
def test_stochastic_codes_beside_every_boundary(device, seed):
    state, amax = torch.tensor([seed, seed], device=device), torch.tensor([2688.0], device=device)
    shape = (256, 272)
    for side, stream in (("rowwise", reference.ROWWISE_STREAM), ("columnwise", reference.COLUMNWISE_STREAM)):
        r = reference.random_bytes(state, shape, stream)
        x = values_beside_boundaries(r).to(device)
        given = x if side == "rowwise" else x.T.contiguous()
        t = zerofp4.quantize(given, block=(1, 16), rowwise=side == "rowwise", columnwise=side == "columnwise")
        ops.quantize_into(given, t.record, amax=amax, rng_state=state)
        expected = reference.pack(reference.float_to_e2m1_stochastic(x, r))
        assert_bytes_equal(getattr(t, f"{side}_data"), expected, side)
