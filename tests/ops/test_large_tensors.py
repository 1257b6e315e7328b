"""Tensors of more than 2^31 elements and 4 GB: their corners are those of quantizing the corners alone.

Each test runs on a small matrix on the CPU too, which keeps its arithmetic of corners right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from helpers import assert_bytes_equal, needs_gpu
from tensor_helpers import FORMATS

import zerofp4
from zerofp4 import ops
from zerofp4.format import BLOCK, MXFP8_BLOCK, SCALE_LAYOUTS
from zerofp4.layout import ceil_div, scale_shape
from zerofp4.shard import Shard

ZEROFP4 = torch.ops.zerofp4
CORNER = 256  # rows and columns, or fewer; a multiple of what an atom of swizzled scales covers
MEMORY = 70e9
LARGEST = 37.0
LARGE = {"square": (2**17 + 18, 2**14 + 20), "tall": (2**27 + 18, 18), "wide": (18, 2**27 + 18)}
SMALL = pytest.param(("cpu", (402, 450)), id="small")
PLACES = [
    SMALL,
    *(
        pytest.param(("cuda", shape), id=name, marks=[pytest.mark.slow, needs_gpu])
        for name, shape in LARGE.items()
    ),
]


def normal(place, dtype=torch.bfloat16) -> torch.Tensor:
    device, shape = place
    if device == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < MEMORY:
            pytest.skip(f"needs {MEMORY / 1e9:.0f} GB of free memory on the GPU")
    torch.manual_seed(0)
    return torch.empty(shape, dtype=dtype, device=device).normal_()


@pytest.fixture(params=PLACES)
def x(request) -> Iterator[torch.Tensor]:
    """bfloat16 [M, K], the largest element the last."""
    x = normal(request.param)
    x[-1, -1] = LARGEST
    yield x


Corner = tuple[slice, slice]


def corners(shape) -> Iterator[Corner]:
    """Of the matrix, which begin at a multiple of 128."""
    sides = [(slice(0, min(CORNER, n)), slice(max(n - CORNER, 0) // 128 * 128, n)) for n in shape]
    return itertools.product(*sides)


def part(extent: slice, of: int) -> slice:
    """In units of so many elements, the last of which may be cut."""
    return slice(extent.start // of, ceil_div(extent.stop, of))


def scale_part(scale, layout, across: slice, along: slice, block_rows: int, block: int) -> torch.Tensor:
    """Of a side's scales: of the elements [across, along] of the matrix that is stored."""
    if layout == "swizzled":
        atoms = scale.view(scale.shape[0] // 128, scale.shape[1] // 4, 512)
        return atoms[part(across, 128), part(along, 4 * block)]
    return scale[part(across, block_rows if layout == "compact" else 1), part(along, block)]


def all_of(shape) -> Corner:
    return tuple(slice(0, size) for size in shape)


def buffers(record, corner: Corner) -> dict[str, torch.Tensor]:
    """What a record in NVFP4 holds of a corner."""
    found = {}
    for name, side in record.sides():
        across, along = corner if name == "rowwise" else corner[::-1]
        data = part(along, 2)
        if name == "columnwise" and along.stop == record.matrix[0]:
            data = slice(data.start, None)  # the transform completes the last group of 16
        found[f"{name}_data"] = side.data[across, data]
        for layout, scale in side.scales.items():
            found[f"{name} {layout}"] = scale_part(scale, layout, across, along, record.block[0], BLOCK)
    return found


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_bytes_equal(value.contiguous(), expected[name].contiguous(), f"{what}: {name}")


@pytest.mark.parametrize("format", FORMATS)
def test_quantize(x, format):
    options = FORMATS[format] | {"columnwise": True, "scale_layouts": SCALE_LAYOUTS}
    t = zerofp4.quantize(x, **options)
    assert t.amax.item() == LARGEST
    amaxes = {"amax": t.amax} | ({"columnwise_amax": t.columnwise_amax} if t.hadamard else {})
    for corner in corners(x.shape):
        alone = zerofp4.quantize(x[corner].contiguous(), **options, **amaxes)
        assert_same(buffers(t.record, corner), buffers(alone.record, all_of(alone.shape)), f"{corner}")


def test_dequantize(x):
    t = zerofp4.quantize(x, columnwise=True)
    values = {
        "float32": t.dequantize(torch.float32),
        "fake": zerofp4.quantize_dequantize(x),
        "columnwise": zerofp4.quantize(x, rowwise=False, columnwise=True).dequantize(),
    }
    for corner in corners(x.shape):
        expected = zerofp4.quantize(x[corner].contiguous(), amax=t.amax).dequantize()
        for name, value in values.items():
            assert_bytes_equal(value[corner].to(x.dtype).contiguous(), expected, f"{name} {corner}")


def mxfp8_buffers(record, corner: Corner) -> dict[str, torch.Tensor]:
    found = {}
    for name, side in record.sides():
        across, along = corner if name == "rowwise" else corner[::-1]
        found[f"{name}_data"] = side.data[corner].view(torch.uint8)
        for layout, scale in side.scales.items():
            stored = scale if name == "rowwise" or layout == "swizzled" else scale.t()
            chosen = scale_part(stored.view(torch.uint8), layout, across, along, 1, MXFP8_BLOCK)
            found[f"{name} {layout}"] = chosen
    return found


def test_mxfp8(x):
    options = {"columnwise": True, "scale_layouts": ["swizzled"]}
    t = zerofp4.quantize_mxfp8(x, **options)
    rowwise = t.dequantize(torch.float32)
    columnwise = zerofp4.quantize_mxfp8(x, rowwise=False, columnwise=True).dequantize(torch.float32)
    for corner in corners(x.shape):
        alone = zerofp4.quantize_mxfp8(x[corner].contiguous(), **options)
        expected = mxfp8_buffers(alone.record, all_of(alone.shape))
        assert_same(mxfp8_buffers(t.record, corner), expected, f"{corner}")
        assert_bytes_equal(rowwise[corner].contiguous(), alone.dequantize(torch.float32), f"{corner}")
        only = zerofp4.quantize_mxfp8(x[corner].contiguous(), rowwise=False, columnwise=True)
        assert_bytes_equal(columnwise[corner].contiguous(), only.dequantize(torch.float32), f"{corner}")


def test_grouped(x):
    """The last group is that of quantizing it alone."""
    last = 4 if x.shape[0] < 2 * CORNER else CORNER
    options = {"columnwise": True, "scale_layouts": SCALE_LAYOUTS}
    grouped = zerofp4.quantize_grouped(x, [2, x.shape[0] - last - 2, last], **options)
    alone = zerofp4.quantize(x[-last:], block=(1, 16), **options)
    for (name, actual), (_, expected) in zip(
        grouped[2].record.buffers(), alone.record.buffers(), strict=True
    ):
        assert_bytes_equal(actual.contiguous(), expected, name)


def test_cast_of_all_and_of_a_shard_near_the_end(x):
    """All is quantize; the shard, from an odd offset on, is that of a weight that has only the last rows."""
    weight = zerofp4.empty(x.shape, device=x.device, scale_layouts=SCALE_LAYOUTS)
    plan = zerofp4.CastPlan([weight], [x.flatten().float()], [0])
    plan.step()
    plan.post()
    t = zerofp4.quantize(x, columnwise=True, scale_layouts=SCALE_LAYOUTS)
    for (name, actual), (_, expected) in zip(weight.record.buffers(), t.record.buffers(), strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)), name
    del plan, t
    rows, cols = x.shape
    first = max(rows - CORNER, 0) // 128 * 128
    start = x.numel() - min(1001, cols * (rows - first) - 1)
    few = zerofp4.empty((rows - first, cols), device=x.device, scale_layouts=SCALE_LAYOUTS)
    shard = x.flatten()[start:].float()
    for each, offset in ((weight, start), (few, start - first * cols)):
        for _, buffer in each.record.buffers():
            buffer.view(torch.uint8).zero_()
        plan = zerofp4.CastPlan([each], [shard], [offset])
        plan.step()
        plan.post()
    actual = buffers(weight.record, (slice(first, rows), slice(0, cols)))
    assert_same(actual, buffers(few.record, all_of(few.shape)), "shard")
    assert few.rowwise_data.any() and not weight.rowwise_data[: max(first, 1) - 1].any()


@pytest.mark.parametrize("place", PLACES)
def test_adamw(place):
    """The first and the last elements are those of tensors that have no others, and so are tile amaxes."""
    x = normal(place, torch.float32)
    rows, cols = x.shape
    state = [x.clone(), torch.zeros((), device=x.device), torch.zeros_like(x), torch.zeros_like(x)]
    options = ops.adamw_options(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False)
    ends = [slice(0, min(CORNER, rows)), slice(max(rows - CORNER, 0) // 16 * 16, rows)]
    small = [[tensor[end].clone() if tensor.dim() else tensor.clone() for tensor in state] for end in ends]
    columns = ceil_div(cols, BLOCK)

    def update(master, step, exp_avg, exp_avg_sq, gradient) -> torch.Tensor:
        shape = master.shape
        reduced = torch.zeros(ops.HEADER_WORDS + 1 + ceil_div(shape[0], BLOCK) * columns, device=x.device)
        places = (ops.HEADER_WORDS + 1, ops.HEADER_WORDS)
        piece = ops.MasterPiece(None, Shard(0, master.numel()), tuple(shape), torch.bfloat16, *places)
        tensors = (master.view(-1), step, exp_avg.view(-1), exp_avg_sq.view(-1))
        stage = ops.AdamWStage([ops.AdamWItem(*tensors, torch.float32, (piece,))], reduced)
        stage.begin(options, 0, [gradient.reshape(-1)])
        stage.update()
        return reduced[ops.HEADER_WORDS + 1 :].view(-1, columns)

    tiles = update(*state, x)
    for end, tensors in zip(ends, small, strict=True):
        alone = update(*tensors, x[end].contiguous())
        for name, whole, expected in zip(("master", "step", "m", "v"), state, tensors, strict=True):
            assert_bytes_equal(whole[end].contiguous() if whole.dim() else whole, expected, f"{end} {name}")
        assert_bytes_equal(tiles[part(end, BLOCK)].contiguous(), alone, f"{end} tile amaxes")


def test_transpose(x):
    data = zerofp4.quantize(x).rowwise_data
    transposed = ZEROFP4.transpose_packed(data)
    assert torch.equal(ZEROFP4.transpose_packed(transposed), data)
    for corner in corners(x.shape):
        codes = ZEROFP4.transpose_packed(data[corner[0], part(corner[1], 2)].contiguous())
        assert_bytes_equal(transposed[corner[1], part(corner[0], 2)].contiguous(), codes, f"{corner}")


@pytest.mark.parametrize(
    "place",
    [
        SMALL,
        pytest.param(("cuda", (2**21 + 2, 16 * 1025)), id="large", marks=[pytest.mark.slow, needs_gpu]),
    ],
)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_scale_layouts(place, layout):
    """Of a matrix that is not there: the scales alone are more than 2^31 bytes."""
    device, shape = place
    scale = torch.empty(scale_shape(*shape, 1), dtype=torch.uint8, device=device).random_(0, 0x7F)
    padded = ZEROFP4.pad_scale(scale, *shape, 1, layout)
    assert torch.equal(ZEROFP4.unpad_scale(padded, *shape, 1, layout), scale)
    for across, along in corners(shape):
        sizes = [extent.stop - extent.start for extent in (across, along)]
        alone = ZEROFP4.pad_scale(scale[across, part(along, BLOCK)].contiguous(), *sizes, 1, layout)
        whole = scale_part(alone, layout, *map(slice, (0, 0), sizes), 1, BLOCK)
        chosen = scale_part(padded, layout, across, along, 1, BLOCK)
        assert_bytes_equal(chosen.contiguous(), whole.contiguous(), f"{across} {along}")
