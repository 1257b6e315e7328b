"""The native operations on every backend against the specification, byte for byte."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import assert_bytes_equal
from hypothesis import example, given
from hypothesis import strategies as st
from test_reference import CASES, check_golden, golden_input

import zerofp4
from zerofp4 import ops, reference
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.layout import ceil_div
from zerofp4.shard import Shard, byte_range
from zerofp4.storage import BUFFERS, NVFP4Storage, allocate

ZEROFP4 = torch.ops.zerofp4
POISON = 0xA5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Shapes at every kind of edge: tiles, 64 and 128 columns, 128 rows, several swizzle atoms.
SHAPES = [
    (1, 2),
    (2, 2),
    (16, 16),
    (17, 30),
    (32, 288),
    (130, 144),
    (96, 272),
    (257, 66),
    (256, 512),
    (34, 1030),
]


def draw_values(seed: int, numel: int, kind: str) -> torch.Tensor:
    """float32 [numel] of one kind of difficulty."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(numel).astype(np.float32)
    if kind == "zeros":
        return torch.from_numpy(np.where(rng.random(numel) < 0.5, np.float32(0), np.float32(-0.0)))
    if kind == "ties":
        grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0], np.float32)
        return torch.from_numpy(rng.choice(grid, numel))
    if kind == "spread":
        return torch.from_numpy((normal * 10.0 ** rng.uniform(-30, 30, numel)).astype(np.float32))
    if kind == "denormal":
        return torch.from_numpy(normal * np.float32(1e-39))
    if kind == "nonfinite":
        normal[rng.integers(0, numel, max(1, numel // 300))] = rng.choice([np.nan, -np.nan, np.inf, -np.inf])
    if kind == "bits":
        return torch.from_numpy(rng.integers(0, 2**32, numel, dtype=np.uint32).view(np.float32))
    return torch.from_numpy(normal)


KINDS = ["normal", "zeros", "ties", "spread", "denormal", "nonfinite", "bits"]


def poisoned(record: NVFP4Storage) -> NVFP4Storage:
    for _, buffer in record.buffers():
        buffer.view(torch.uint8).fill_(POISON)
    return record


def poisoned_like(shape, dtype, device, block=(BLOCK, BLOCK), **kwargs) -> NVFP4Storage:
    columnwise = kwargs.pop("columnwise", shape[0] % 2 == 0)
    return poisoned(allocate(shape, dtype=dtype, device=device, block=block, columnwise=columnwise, **kwargs))


def expected_buffers(q: reference.Quantized, shape, block_rows: int) -> dict[str, torch.Tensor]:
    """What every buffer of a record should hold."""
    rows, cols = shape
    expected = {"rowwise_data": q.rowwise_data, "rowwise_scale": q.rowwise_scale, "amax": q.amax}
    sides = [("rowwise", q.rowwise_scale, rows, cols)]
    if q.columnwise_data is not None:
        expected |= {"columnwise_data": q.columnwise_data, "columnwise_scale": q.columnwise_scale}
        sides.append(("columnwise", q.columnwise_scale, cols, rows))
    for side, scale, m, k in sides:
        expanded = reference.expand_scale(scale, m, k, block_rows)
        expected[f"{side}_scale_expanded"] = expanded
        expected[f"{side}_scale_swizzled"] = reference.swizzle_scale(expanded)
    return expected


def assert_record_equals(record: NVFP4Storage, q: reference.Quantized, what: str) -> None:
    expected = expected_buffers(q, record.matrix, record.block[0])
    for name, buffer in record.buffers():
        assert_bytes_equal(buffer, expected[name].to(buffer.device), f"{what}: {name}")


# quantize


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("mode", "block_rows"), [("2d", 16), ("1d", 1)])
def test_quantize_equals_golden_file(device, case, mode, block_rows):
    x = golden_input(case).to(device)
    record = poisoned_like(x.shape, x.dtype, device, (block_rows, BLOCK), scale_layouts=SCALE_LAYOUTS)
    ops.quantize_into(x, record)
    fields = {
        "data": record.rowwise_data,
        "scale": record.rowwise_scale,
        "data_t": record.columnwise_data,
        "scale_t": record.columnwise_scale,
        "amax": record.amax,
        "dequant_f32": ZEROFP4.dequantize(
            record.rowwise_data, record.rowwise_scale, record.amax, block_rows, torch.float32
        ),
        "scale_swizzled": record.rowwise_scale_swizzled,
    }
    check_golden(case, mode, {name: value.cpu() for name, value in fields.items()})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_rows", [1, 16])
def test_quantize_every_shape_and_dtype(device, shape, dtype, block_rows):
    x = draw_values(0, shape[0] * shape[1], "normal").view(shape).to(dtype).to(device)
    record = poisoned_like(shape, dtype, device, (block_rows, BLOCK), scale_layouts=SCALE_LAYOUTS)
    ops.quantize_into(x, record)
    assert_record_equals(record, reference.quantize(x, block_rows), f"{shape} {dtype}")


@given(
    rows=st.integers(1, 150),
    half=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    block_rows=st.sampled_from([1, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantize_drawn(device, rows, half, dtype, kind, block_rows, seed):
    shape = (rows, 2 * half)
    x = draw_values(seed, rows * 2 * half, kind).view(shape).to(dtype).to(device)
    record = poisoned_like(shape, dtype, device, (block_rows, BLOCK), scale_layouts=SCALE_LAYOUTS)
    ops.quantize_into(x, record)
    assert_record_equals(record, reference.quantize(x, block_rows), f"{shape} {dtype} {kind}")


@pytest.mark.parametrize("block_rows", [1, 16])
def test_quantize_with_given_amax_saturates(device, block_rows):
    x = draw_values(1, 64 * 96, "normal").view(64, 96).to(device)
    amax = torch.tensor([0.5], device=device)
    record = poisoned_like(x.shape, x.dtype, device, (block_rows, BLOCK))
    ops.quantize_into(x, record, amax)
    assert_record_equals(record, reference.quantize(x, block_rows, amax), "given amax")


@pytest.mark.parametrize("block_rows", [1, 16])
def test_quantize_columnwise_only(device, block_rows):
    x = draw_values(2, 48 * 80, "normal").view(48, 80).to(device)
    record = poisoned_like(x.shape, x.dtype, device, (block_rows, BLOCK), rowwise=False, columnwise=True)
    ops.quantize_into(x, record)
    assert record.rowwise_data is None
    assert_record_equals(record, reference.quantize(x, block_rows), "columnwise only")


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_quantize_empty(device, shape):
    record = poisoned_like(shape, torch.float32, device)
    ops.quantize_into(torch.empty(shape, device=device), record)
    assert record.amax.item() == 0


# dequantize, transpose, layouts


def assert_values_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bytes, except that NaNs may differ in payload and sign: IEEE 754 leaves both to the hardware."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), f"{what}: NaN at other places"
    assert_bytes_equal(actual.masked_fill(nan, 0), expected.masked_fill(nan, 0), what)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_rows", [1, 16])
def test_dequantize_every_code_and_scale(device, shape, dtype, block_rows):
    """Random bytes: all codes, all finite non-negative scales, not only those that quantize produces."""
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows + cols)
    data = torch.randint(256, (rows, cols // 2), dtype=torch.uint8, generator=generator)
    scale_rows = ceil_div(rows, block_rows)
    scale = torch.randint(0x7F, (scale_rows, ceil_div(cols, BLOCK)), dtype=torch.uint8, generator=generator)
    for amax in (0.0, 1e-40, 3.7, 6e4, 3e38, torch.inf):
        args = (data.to(device), scale.view(SCALE_DTYPE).to(device), torch.tensor([amax], device=device))
        actual = ZEROFP4.dequantize(*args, block_rows, dtype)
        assert_values_equal(actual, reference.dequantize(*args, block_rows, dtype), f"amax {amax}")


@pytest.mark.parametrize("shape", [(2, 2), (16, 16), (18, 30), (128, 128), (130, 144), (256, 66), (34, 1030)])
def test_transpose_packed(device, shape):
    data = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8).to(device)
    assert_bytes_equal(ZEROFP4.transpose_packed(data), reference.transpose_packed(data), f"{shape}")


def test_transpose_many_in_one_call(device):
    shapes = [(16, 32), (130, 66), (0, 8), (2, 2), (256, 128)]
    data = [torch.randint(256, (m, k // 2), dtype=torch.uint8).to(device) for m, k in shapes]
    out = [torch.full((k, m // 2), POISON, dtype=torch.uint8, device=device) for m, k in shapes]
    ZEROFP4.transpose_packed_into(data, out)
    for shape, source, result in zip(shapes, data, out, strict=True):
        assert_bytes_equal(result, reference.transpose_packed(source), f"{shape}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_scale_layouts(device, shape, block_rows, layout):
    rows, cols = shape
    compact = torch.randint(0x7F, (ceil_div(rows, block_rows), ceil_div(cols, BLOCK)), dtype=torch.uint8)
    compact = compact.view(SCALE_DTYPE).to(device)
    expected = reference.expand_scale(compact, rows, cols, block_rows)
    if layout == "swizzled":
        expected = reference.swizzle_scale(expected)
    padded = ZEROFP4.pad_scale(compact, rows, cols, block_rows, layout)
    assert_bytes_equal(padded, expected, layout)
    assert_bytes_equal(ZEROFP4.unpad_scale(padded, rows, cols, block_rows, layout), compact, "back")


@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_padding_is_not_read(device, layout):
    """0xFF in the padding of a padded scale changes nothing."""
    rows, cols, block_rows = 130, 144, 16
    compact = torch.randint(0x7F, (9, 9), dtype=torch.uint8).view(SCALE_DTYPE).to(device)
    expanded = reference.expand_scale(compact, rows, cols, block_rows).view(torch.uint8)
    expanded[rows:] = 0xFF
    expanded[:, 9:] = 0xFF
    padded = expanded.view(SCALE_DTYPE)
    if layout == "swizzled":
        padded = reference.swizzle_scale(padded)
    assert_bytes_equal(ZEROFP4.unpad_scale(padded, rows, cols, block_rows, layout), compact, layout)


# The operators in torch.library


def operator_calls(device) -> list:
    x = torch.randn(32, 48, device=device)
    record = poisoned_like(x.shape, x.dtype, device, scale_layouts=SCALE_LAYOUTS)
    ops.quantize_into(x, record)
    # Scales as bytes: opcheck compares arguments with operations that float8 does not have.
    buffers = [getattr(record, name).view(torch.uint8) for name in BUFFERS[:8]]
    rowwise_only = [*buffers[:2], *[None] * 6]
    scale, expanded = buffers[1:3]
    return [
        (ZEROFP4.quantize, (x, 16, None, record.amax, *buffers)),
        (ZEROFP4.quantize, (x, 16, record.amax.clone(), record.amax, *rowwise_only)),
        (ZEROFP4.dequantize, (record.rowwise_data, scale, record.amax, 16, torch.bfloat16)),
        (ZEROFP4.transpose_packed, (record.rowwise_data,)),
        (ZEROFP4.transpose_packed_into, ([record.rowwise_data], [record.columnwise_data])),
        (ZEROFP4.pad_scale, (scale, 32, 48, 16, "swizzled")),
        (ZEROFP4.unpad_scale, (expanded, 32, 48, 16, "expanded")),
    ]


@pytest.mark.parametrize("index", range(7))
def test_opcheck(device, index):
    operator, args = operator_calls(device)[index]
    torch.library.opcheck(operator.default, args)


def test_quantize_and_dequantize_trace_under_compile(device):
    def round_trip(x):
        record = allocate(x.shape, dtype=x.dtype, device=x.device, columnwise=False)
        ops.quantize_into(x, record)
        scale = ZEROFP4.pad_scale(record.rowwise_scale, *x.shape, 16, "swizzled")
        return (
            ZEROFP4.dequantize(record.rowwise_data, record.rowwise_scale, record.amax, 16, x.dtype),
            scale,
        )

    x = torch.randn(64, 96, device=device)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(x), round_trip(x), strict=True):
        assert_bytes_equal(actual, expected, "compiled")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 5)}, ValueError, "last dimension must be even, got 5"),
        ({"x": torch.zeros(4, 6, dtype=torch.int32)}, ValueError, "x must be a matrix of one of"),
        ({"x": torch.zeros(6, 4).t()}, ValueError, "x must be contiguous"),
        ({"block_rows": 4}, ValueError, "block_rows must be 1 or 16, got 4"),
        ({"amax": torch.zeros(2)}, ValueError, r"amax must have shape \(1,\)"),
        ({"rowwise_data": torch.zeros(4, 6, dtype=torch.uint8)}, ValueError, "rowwise_data must have shape"),
        ({"rowwise_data": torch.zeros(4, 3)}, TypeError, "rowwise_data must be a torch.uint8 tensor"),
        ({"rowwise_scale": None}, ValueError, "must be given together"),
    ],
)
def test_quantize_refuses(change, error, message):
    x = torch.zeros(4, 6)
    record = allocate(x.shape, dtype=x.dtype, device=x.device, columnwise=False)
    arguments = {"x": x, "block_rows": 16, "given_amax": None, "amax": record.amax}
    arguments |= {name: getattr(record, name) for name in BUFFERS[:8]}
    with pytest.raises(error, match=message):
        ZEROFP4.quantize(*(arguments | change).values())


def test_odd_rows_have_no_transpose():
    with pytest.raises(ValueError, match="rows must be even, got 3"):
        ZEROFP4.transpose_packed(torch.zeros(3, 4, dtype=torch.uint8))


# Stages of a plan on shards


class ShardCase:
    """One weight and a shard of it, with the tensors that the stages work on, all poisoned."""

    def __init__(self, device, shape, start, numel, dtype, kind, seed):
        self.shape, self.dtype, self.shard = shape, dtype, Shard(start, numel)
        self.whole = draw_values(seed, shape[0] * shape[1], kind)
        # A view at an element offset, so that masters are not aligned to more than 4 bytes.
        self.master = torch.cat([torch.zeros(seed % 4), self.whole[start : start + numel]]).to(device)[
            seed % 4 :
        ]
        self.record = poisoned_like(shape, dtype, device, scale_layouts=SCALE_LAYOUTS)
        first, last = byte_range(self.shard)
        self.codes = torch.full((last - first,), POISON, dtype=torch.uint8, device=device)
        tiles = ceil_div(shape[0], BLOCK) * ceil_div(shape[1], BLOCK)
        self.reduced = torch.full((ops.HEADER_WORDS + 1 + tiles,), torch.nan, device=device)
        self.found_inf = torch.zeros(1, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        item = ops.CastItem(
            self.record, self.master, self.shard, self.codes, ops.HEADER_WORDS + 1, ops.HEADER_WORDS
        )
        self.stages = ops.CastStages(
            [item], self.reduced, hash=77, found_inf=self.found_inf, status=self.status
        )

    @property
    def tile_amax(self) -> torch.Tensor:
        return self.reduced[ops.HEADER_WORDS + 1 :].view(
            ceil_div(self.shape[0], BLOCK), ceil_div(self.shape[1], BLOCK)
        )

    @property
    def amax(self) -> torch.Tensor:
        return self.reduced[ops.HEADER_WORDS : ops.HEADER_WORDS + 1]


@st.composite
def shard_cases(draw):
    rows, cols = draw(st.integers(1, 100)), 2 * draw(st.integers(1, 200))
    start = draw(st.integers(0, rows * cols))
    numel = draw(st.integers(0, rows * cols - start))
    return (rows, cols), start, numel, draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))


@given(case=shard_cases(), seed=st.integers(0, 2**32 - 1))
@example(case=((16, 16), 17, 3, torch.bfloat16, "normal"), seed=0)
@example(case=((16, 400), 131, 1, torch.bfloat16, "normal"), seed=1)
@example(case=((33, 288), 4095, 1026, torch.bfloat16, "normal"), seed=2)
@example(case=((64, 128), 0, 64 * 128, torch.float16, "spread"), seed=0)
def test_stages_on_a_shard(device, case, seed):
    shape, start, numel, dtype, kind = case
    c = ShardCase(device, shape, start, numel, dtype, kind, seed)
    c.stages.begin()
    c.stages.amax()
    tile_amax, amax = reference.partial_amax(c.master, start, shape, dtype)
    assert c.reduced[: ops.HEADER_WORDS].tolist() == [0, 77, -77, 0]
    assert_bytes_equal(c.tile_amax, tile_amax, "tile amax")
    assert_bytes_equal(c.amax, amax, "amax")
    # What an all-reduce would do: the other ranks' parts of the weight.
    whole = c.whole.to(device)
    tile_amax, amax = reference.partial_amax(whole, 0, shape, dtype)
    c.tile_amax.copy_(tile_amax)
    c.amax.copy_(amax)
    c.stages.scale()
    c.stages.cast()
    assert c.status.item() == 0
    if amax.isinf():
        assert c.found_inf.item() == 1
        assert (c.codes == POISON).all(), "codes of a weight that is not finite were touched"
        assert all((b.view(torch.uint8) == POISON).all() for _, b in c.record.buffers())
        return
    assert c.found_inf.item() == 0
    expected_codes = torch.full_like(c.codes, POISON)
    reference.partial_cast(c.master, start, shape, dtype, tile_amax, amax, expected_codes)
    assert_bytes_equal(c.codes, expected_codes, "codes")
    expected = expected_buffers(reference.quantize(whole.view(shape).to(dtype)), shape, BLOCK)
    for name, buffer in c.record.buffers():
        if not name.endswith("_data"):
            assert_bytes_equal(buffer, expected[name], name)


@pytest.mark.parametrize(
    ("word", "value", "status"),
    [(0, torch.inf, ops.PEER_ERROR), (1, 78.0, ops.PLAN_MISMATCH), (2, -76.0, ops.PLAN_MISMATCH)],
)
def test_nobody_writes_when_the_header_says_no(device, word, value, status):
    c = ShardCase(device, (40, 64), 5, 1000, torch.bfloat16, "normal", 0)
    c.stages.begin()
    c.stages.amax()
    c.reduced[word] = value
    c.stages.scale()
    c.stages.cast()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert c.status.item() == status
    assert (c.codes == POISON).all()
    assert all((b.view(torch.uint8) == POISON).all() for _, b in c.record.buffers())


def test_begin_with_an_error_flags_the_vector(device):
    c = ShardCase(device, (40, 64), 5, 1000, torch.bfloat16, "normal", 0)
    c.stages.begin(error=True)
    assert c.reduced[0].item() == torch.inf and not c.reduced[3:].any()


def test_many_weights_in_one_plan(device):
    """Sizes from one tile to many, empty shards, shared amax words: each weight as if it were alone."""
    shapes = [(2, 2), (130, 66), (16, 16), (64, 1000), (48, 48), (256, 256), (34, 30)] * 5
    rng = np.random.default_rng(0)
    cases, items, total = [], [], ops.HEADER_WORDS + len(shapes)
    for i, shape in enumerate(shapes):
        numel = shape[0] * shape[1]
        start, end = sorted(rng.integers(0, numel + 1, 2).tolist()) if i % 4 else (0, 0)
        c = ShardCase(device, shape, start, end - start, DTYPES[i % 3], "normal", i)
        cases.append(c)
        items.append(ops.CastItem(c.record, c.master, c.shard, c.codes, total, ops.HEADER_WORDS + i // 2))
        total += c.tile_amax.numel()
    reduced = torch.full((total,), torch.nan, device=device)
    stages = ops.CastStages(items, reduced)
    stages.begin()
    stages.amax()
    for i, (c, item) in enumerate(zip(cases, items, strict=True)):
        tile_amax, _ = reference.partial_amax(c.master, c.shard.start, c.shape, c.dtype)
        assert_bytes_equal(
            reduced[item.tile_offset :][: tile_amax.numel()], tile_amax.flatten(), f"tile amax {i}"
        )
    for g in range((len(shapes) + 1) // 2):
        members = cases[2 * g : 2 * g + 2]
        amaxes = [reference.partial_amax(c.master, c.shard.start, c.shape, c.dtype)[1] for c in members]
        assert reduced[ops.HEADER_WORDS + g] == torch.stack(amaxes).max()
    stages.scale()
    stages.cast()
    for i, (c, item) in enumerate(zip(cases, items, strict=True)):
        tile_amax, _ = reference.partial_amax(c.master, c.shard.start, c.shape, c.dtype)
        amax = reduced[item.amax_offset].reshape(1)
        expected = torch.full_like(c.codes, POISON)
        reference.partial_cast(c.master, c.shard.start, c.shape, c.dtype, tile_amax, amax, expected)
        assert_bytes_equal(c.codes, expected, f"codes {i}")
        assert_bytes_equal(c.record.rowwise_scale, reference.block_scale(tile_amax, amax), f"scale {i}")


def test_build_info_says_what_runs():
    info = zerofp4.build_info()
    assert info["cpu"]["running"] in info["cpu"]["compiled"]
    assert info["cuda"]["compiled"] == (info["cuda"]["version"] is not None)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    """The tests above ran with the best one; here again, shorter, with each that this processor has."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            __file__,
            "-k",
            "cpu and (stages or every_shape or golden or packed)",
        ],
        env=os.environ | {"ZEROFP4_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )
    if "this build runs" in run.stdout:
        pytest.skip(f"this processor or build has no {isa}")
    assert run.returncode == 0, run.stdout


@pytest.mark.skipif(zerofp4.build_info()["cuda"]["compiled"], reason="this build has CUDA")
def test_build_without_cuda_refuses_cuda_tensors():
    with pytest.raises(RuntimeError, match="built without CUDA: reinstall it where nvcc is on the PATH"):
        ops.check_cuda(0)
