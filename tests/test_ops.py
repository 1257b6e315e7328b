"""The native operations on every backend against the specification, byte for byte."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st
from op_cases import DTYPES, KINDS, POISON, SHAPES, assert_record_equals, draw_values, poisoned_like
from test_reference import CASES, check_golden, golden_input

import zerofp4
from zerofp4 import ops, reference
from zerofp4.format import BLOCK, SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.layout import ceil_div
from zerofp4.storage import BUFFERS, allocate

ZEROFP4 = torch.ops.zerofp4

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
