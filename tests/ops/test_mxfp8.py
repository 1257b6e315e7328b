"""quantize_mxfp8 on every backend against the specification; the round trip, compiled and captured."""

import itertools
import math

import pytest
import torch
from cases.mxfp8 import NAMES, SHAPES, at_an_offset, expected_buffers
from cases.ops import DTYPES, KINDS, draw_values, marked
from helpers import assert_all_equal, assert_bytes_equal, assert_values_equal, needs_gpu
from hypothesis import given
from hypothesis import strategies as st

import zerofp4
from zerofp4 import reference
from zerofp4.format import MXFP8_SCALE_DTYPE

ZEROFP4 = torch.ops.zerofp4
COMPACT = [name for name in NAMES if "swizzled" not in name]


def check_quantize(x: torch.Tensor, names=NAMES, offset: int = 0) -> None:
    expected = expected_buffers(x)
    offsets = {name: offset * ("data" in name) for name in names}
    buffers = {name: at_an_offset(expected[name].shape, x.device, offsets[name]) for name in names}
    ZEROFP4.quantize_mxfp8(x, None, *(buffers.get(name) for name in NAMES))
    for name, buffer in buffers.items():
        assert_bytes_equal(buffer, expected[name], f"{tuple(x.shape)} {x.dtype}: {name}")


# The scale


def test_scale_is_the_least_power_of_two():
    fractions = (1.0, 1.0 + 2**-23, 1.75 - 2**-22, 1.75, 1.75 + 2**-22, 2.0 - 2**-23)
    amaxes = [math.ldexp(f, e) for f, e in itertools.product(fractions, range(-149, 128))]
    amaxes = torch.tensor([0.0, *amaxes], dtype=torch.float64).float()
    for amax, byte in zip(amaxes, reference.mxfp8_scale(amaxes).view(torch.uint8).tolist(), strict=True):
        quotient = (amax * (1 / 448)).item()
        assert quotient <= 2.0 ** (byte - 127), f"amax {amax}"
        assert byte == 0 or quotient > 2.0 ** (byte - 128), f"amax {amax}"
    nonfinite = torch.tensor([torch.inf, torch.nan])
    assert reference.mxfp8_scale(nonfinite).view(torch.uint8).tolist() == [254, 255]


def test_factors_are_powers_of_two_over_all_bytes():
    scale = torch.arange(256, dtype=torch.uint8).view(MXFP8_SCALE_DTYPE)
    powers = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [torch.nan])
    assert_values_equal(reference.mxfp8_decode(scale), powers, "decode")
    assert_values_equal(reference.mxfp8_encode(scale), 1 / powers, "encode")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("columnwise", [False, True])
def test_quantize_every_exponent(device, columnwise):
    """Blocks whose amaxes lie around every place where the scale changes, Inf and NaN included."""
    mantissas = [0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    bits = torch.tensor([e << 23 | m for e, m in itertools.product(range(256), mantissas)], dtype=torch.int32)
    amax = bits.view(torch.float32).unsqueeze(1)
    factors = draw_values(0, 32, "normal").clamp(-1, 1)
    factors[7], factors[8] = 1, 0
    x = (amax * factors).contiguous()
    x[::2] = -x[::2]
    check_quantize(x.t().contiguous().to(device) if columnwise else x.to(device))


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_every_value_as_amax(device, dtype, columnwise):
    x = torch.zeros(1 << 16, 32, dtype=dtype)
    x[:, 19] = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x.t().contiguous() if columnwise else x
    check_quantize(x.to(device), COMPACT[2:] if columnwise else COMPACT[:2])


def test_nonfinite_elements(device):
    x = torch.zeros(3, 64)
    x[0, 3], x[0, 4], x[1, 3], x[1, 4], x[2, 5] = torch.nan, 1.0, -torch.inf, 1e30, -torch.nan
    m = zerofp4.quantize_mxfp8(x.to(device))
    assert m.rowwise_scale.view(torch.uint8).tolist() == [[255, 0], [254, 0], [255, 0]]
    data = m.rowwise_data.view(torch.uint8).cpu()
    assert (data[[0, 2], :32] == 0x7F).all() and not data[:, 32:].any()
    assert data[1, :6].tolist() == [0, 0, 0, 0xFE, 0, 0]


# Quantize


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", marked("threads", SHAPES, (129, 513)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_every_shape_and_dtype(device, shape, dtype):
    check_quantize(draw_values(0, math.prod(shape), "normal").view(shape).to(dtype).to(device))


@given(
    rows=st.integers(1, 150),
    cols=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantize_drawn(device, rows, cols, dtype, kind, seed):
    check_quantize(draw_values(seed, rows * cols, kind).view(rows, cols).to(dtype).to(device))


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", [(33, 100), (40, 512)])
@pytest.mark.parametrize(
    "names",
    [NAMES[:2], NAMES[:3], NAMES[3:5], NAMES[3:], COMPACT, NAMES[:2] + NAMES[3:], NAMES[:5], ()],
    ids=lambda names: "+".join(names) or "none",
)
def test_quantize_only_what_is_asked_for(device, shape, names):
    check_quantize(draw_values(1, math.prod(shape), "spread").view(shape).to(device), names)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_quantize_at_any_address(device, dtype, offset):
    memory = draw_values(2, 64 * 512 + 16, "normal").to(dtype).to(device)
    check_quantize(memory[offset : offset + 64 * 512].view(64, 512), offset=offset)
    check_quantize(memory[: 64 * 512].view(64, 512), offset=offset)


# The operators in torch.library


@pytest.mark.heavy
def test_opcheck(device):
    x = torch.randn(33, 100, device=device)
    # As bytes: opcheck compares arguments with operations that float8 does not have.
    buffers = [buffer.to(device) for buffer in expected_buffers(x).values()]
    some = (torch.ones(1, device=device), *buffers[:2], *[None] * 4)
    for args in ((None, *buffers), some):
        torch.library.opcheck(ZEROFP4.quantize_mxfp8.default, (x, *args))


def round_trip(x):
    m = zerofp4.quantize_mxfp8(x, columnwise=True, scale_layouts=["swizzled"])
    values = ZEROFP4.dequantize_mxfp8(m.columnwise_data, m.columnwise_scale, True, "compact", x.dtype)
    return m.dequantize(), values, m.swizzled_scale(columnwise=True).view(torch.uint8)


@needs_gpu
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (64, 96), (33, 100)])
def test_round_trip_in_a_captured_graph(shape):
    x = torch.randn(shape, device="cuda")
    round_trip(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = round_trip(x)
    x.normal_()
    graph.replay()
    assert_all_equal(results, round_trip(x), "replayed")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
def test_empty(device, shape):
    check_quantize(torch.empty(shape, device=device))
