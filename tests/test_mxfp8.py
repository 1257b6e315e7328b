"""MXFP8 on every backend against the specification, byte for byte."""

import itertools
import math

import pytest
import torch
from fused_cases import assert_values_equal
from helpers import assert_bytes_equal, why_no_cuda
from hypothesis import given
from hypothesis import strategies as st
from op_cases import DTYPES, KINDS, POISON, draw_values, run_with_instruction_set

import zerofp4
from zerofp4 import reference
from zerofp4.format import MXFP8_DATA_DTYPE, MXFP8_SCALE_DTYPE
from zerofp4.layout import mxfp8_scale_shape
from zerofp4.mxfp8 import MXFP8Storage

ZEROFP4 = torch.ops.zerofp4
NAMES = MXFP8Storage.buffer_names
COMPACT = [name for name in NAMES if "swizzled" not in name]

# Cut blocks, vectors and warps of every kind, and several swizzle atoms.
SHAPES = [
    (1, 1),
    (1, 32),
    (3, 31),
    (31, 33),
    (32, 32),
    (33, 64),
    (7, 257),
    (40, 264),
    (65, 130),
    (64, 512),
    (128, 128),
    (129, 513),
    (300, 36),
]


def expected_buffers(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every buffer should hold, as bytes."""
    q = reference.quantize_mxfp8(x.cpu())
    expected = q._asdict()
    for side, columnwise in (("rowwise", False), ("columnwise", True)):
        swizzled = reference.swizzle_mxfp8_scale(expected[f"{side}_scale"], *x.shape, columnwise)
        expected[f"{side}_scale_swizzled"] = swizzled
    return {name: expected[name].view(torch.uint8) for name in NAMES}


class Guarded:
    """A poisoned buffer of bytes with poison around it; `offset` bytes from where it would be aligned."""

    MARGIN = 256

    def __init__(self, shape, device, offset: int = 0):
        self.numel, self.begin = math.prod(shape), self.MARGIN + offset
        size = self.begin + self.numel + self.MARGIN
        self.memory = torch.full((size,), POISON, dtype=torch.uint8, device=device)
        self.buffer = self.memory[self.begin : self.begin + self.numel].view(shape)

    def check(self, expected: torch.Tensor, what: str) -> None:
        assert_bytes_equal(self.buffer, expected, what)
        around = torch.cat([self.memory[: self.begin], self.memory[self.begin + self.numel :]])
        assert (around == POISON).all(), f"{what}: something was written beside it"


def check_quantize(x: torch.Tensor, names=NAMES, offset: int = 0) -> None:
    expected = expected_buffers(x)
    buffers = {name: Guarded(expected[name].shape, x.device, offset * ("data" in name)) for name in names}
    ZEROFP4.quantize_mxfp8(x, None, *(buffers[name].buffer if name in names else None for name in NAMES))
    for name, guarded in buffers.items():
        guarded.check(expected[name], f"{tuple(x.shape)} {x.dtype}: {name}")


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


@pytest.mark.parametrize("shape", SHAPES)
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


# Dequantize


def random_bytes(shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


def swizzled_bytes(scale: torch.Tensor, shape, columnwise: bool) -> torch.Tensor:
    """Compact scale bytes swizzled, with 0xFF as padding."""
    swizzled = reference.swizzle_mxfp8_scale(scale, *shape, columnwise)
    exists = reference.swizzle_mxfp8_scale(torch.ones_like(scale), *shape, columnwise)
    return torch.where(exists == 1, swizzled, 0xFF)


def check_dequantize(data, scale, columnwise: bool, dtype, device, offset: int = 0) -> None:
    """data and scale: bytes on the CPU."""
    formats = data.view(MXFP8_DATA_DTYPE), scale.view(MXFP8_SCALE_DTYPE)
    expected = reference.dequantize_mxfp8(*formats, columnwise, dtype)
    guarded = Guarded(data.shape, device, offset)
    guarded.buffer.copy_(data)
    layouts = {"compact": scale, "swizzled": swizzled_bytes(scale, data.shape, columnwise)}
    for layout, scales in layouts.items():
        actual = ZEROFP4.dequantize_mxfp8(guarded.buffer, scales.to(device), columnwise, layout, dtype)
        assert_values_equal(actual.cpu(), expected, f"{tuple(data.shape)} {dtype} {layout}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize_every_byte_and_scale(device, columnwise, dtype):
    every = torch.arange(256, dtype=torch.uint8)
    data, scale = every.repeat(256, 1), every.repeat(8, 1).t().contiguous()
    if columnwise:
        data, scale = data.t().contiguous(), scale.t().contiguous()
    check_dequantize(data, scale, columnwise, dtype, device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize_every_shape_and_dtype(device, shape, dtype, columnwise):
    scale = random_bytes(mxfp8_scale_shape(*shape, columnwise), 1)
    for offset in (0, 1):
        check_dequantize(random_bytes(shape, 0), scale, columnwise, dtype, device, offset)


# The operators in torch.library


def operator_calls(device) -> list:
    x = torch.randn(33, 100, device=device)
    # As bytes: opcheck compares arguments with operations that float8 does not have.
    buffers = [buffer.to(device) for buffer in expected_buffers(x).values()]
    return [
        (ZEROFP4.quantize_mxfp8, (x, None, *buffers)),
        (ZEROFP4.quantize_mxfp8, (x, torch.ones(1, device=device), *buffers[:2], *[None] * 4)),
        (ZEROFP4.dequantize_mxfp8, (*buffers[:2], False, "compact", torch.bfloat16)),
        (ZEROFP4.dequantize_mxfp8, (buffers[3], buffers[5], True, "swizzled", torch.float32)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_opcheck(device, index):
    operator, args = operator_calls(device)[index]
    torch.library.opcheck(operator.default, args)


def round_trip(x):
    m = zerofp4.quantize_mxfp8(x, columnwise=True, scale_layouts=["swizzled"])
    values = ZEROFP4.dequantize_mxfp8(m.columnwise_data, m.columnwise_scale, True, "compact", x.dtype)
    return m.dequantize(), values, m.swizzled_scale(columnwise=True).view(torch.uint8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_round_trip(device, backend):
    torch._dynamo.reset()
    x = torch.randn(64, 96, device=device)
    compiled = torch.compile(round_trip, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(x), round_trip(x), strict=True):
        assert_bytes_equal(actual, expected, "compiled")


@pytest.mark.skipif(why_no_cuda() is not None, reason=str(why_no_cuda()))
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (64, 96), (33, 100)])
def test_round_trip_in_a_captured_graph(shape):
    x = torch.randn(shape, device="cuda")
    round_trip(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = round_trip(x)
    x.normal_()
    graph.replay()
    for actual, expected in zip(results, round_trip(x), strict=True):
        assert_bytes_equal(actual, expected, "replayed")


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_empty(device, shape, columnwise):
    check_quantize(torch.empty(shape, device=device))
    data = torch.empty(shape, dtype=torch.uint8, device=device)
    for layout in ("compact", "swizzled"):
        scale = torch.empty(mxfp8_scale_shape(*shape, columnwise, layout), dtype=torch.uint8, device=device)
        assert ZEROFP4.dequantize_mxfp8(data, scale, columnwise, layout, torch.float16).shape == shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 6, dtype=torch.int32)}, ValueError, "x must be a matrix of one of"),
        ({"x": torch.zeros(24)}, ValueError, r"x must be a matrix of one of .* \(24,\)"),
        ({"x": torch.zeros(6, 4).t()}, ValueError, "x must be contiguous"),
        ({"skip": torch.zeros(2)}, ValueError, r"skip must have shape \(1,\)"),
        ({"rowwise_data": torch.zeros(4, 6)}, TypeError, "rowwise_data must be a torch.uint8 tensor"),
        ({"rowwise_data": torch.zeros(4, 3).byte()}, ValueError, r"rowwise_data must have shape \(4, 6\)"),
        ({"columnwise_scale": torch.zeros(6, 1).byte()}, ValueError, r"columnwise_scale must have shape \(1"),
        ({"rowwise_scale": None}, ValueError, "rowwise_data and rowwise_scale must be given together"),
        ({"columnwise_data": None}, ValueError, "columnwise_scale must be given together with columnwise_d"),
        ({"rowwise_scale_swizzled": torch.zeros(4, 1).byte()}, ValueError, r"must have shape \(128, 4\)"),
    ],
)
def test_quantize_refuses(change, error, message):
    x = torch.zeros(4, 6)
    with pytest.raises(error, match=message):
        ZEROFP4.quantize_mxfp8(*({"x": x, "skip": None, **expected_buffers(x)} | change).values())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": torch.zeros(24).byte()}, ValueError, "data must be a matrix"),
        ({"data": torch.zeros(4, 6)}, TypeError, "data must be a torch.uint8 tensor"),
        ({"scale": torch.zeros(1, 6).byte()}, ValueError, r"scale must have shape \(4, 1\), got \(1, 6\)"),
        ({"layout": "expanded"}, ValueError, "MXFP8 scale layout must be one of .*'expanded'"),
        ({"layout": "swizzled"}, ValueError, r"scale must have shape \(128, 4\), got \(4, 1\)"),
        ({"dtype": torch.float64}, ValueError, "dtype must be one of .*float64"),
    ],
)
def test_dequantize_refuses(change, error, message):
    data, scale = torch.zeros(4, 6).byte(), torch.zeros(4, 1).byte()
    arguments = {"data": data, "scale": scale, "columnwise": False, "layout": "compact"}
    with pytest.raises(error, match=message):
        ZEROFP4.dequantize_mxfp8(*({**arguments, "dtype": torch.float32} | change).values())


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    run_with_instruction_set(isa, __file__, "cpu and (every or asked or empty)")
