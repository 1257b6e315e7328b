"""dequantize and dequantize_many on every backend against the specification, byte for byte."""

import functools

import pytest
import torch
from cases.ops import DTYPES, SHAPES, in_layout, marked, random_bytes
from helpers import assert_bytes_equal, assert_values_equal, poisoned_allocations

import zerofp4
from zerofp4 import ops, reference
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.layout import scale_shape

ZEROFP4 = torch.ops.zerofp4

# Also whole vectors of the kernels where the last of them has half a scaling block, and several warps.
MORE_SHAPES = [(16, 8), (48, 264), (64, 520), (144, 72), (80, 1032)]
AMAXES = (0.0, 1e-40, 3.7, 6e4, 3e38, torch.inf)


class Case:
    """All codes and all finite non-negative scales, not only those that quantize produces."""

    def __init__(self, shape, block_rows: int = 16, columnwise: bool = False, layout: str = "compact"):
        rows, cols = shape[::-1] if columnwise else shape  # of the stored matrix
        self.block_rows, self.columnwise, self.layout = block_rows, columnwise, layout
        self.data = random_bytes((rows, cols // 2), rows + cols)
        self.compact = random_bytes(scale_shape(rows, cols, block_rows), rows * cols, 0x7E)
        self.scale = in_layout(self.compact, rows, cols, block_rows, layout)

    def run(self, device, amax: float, dtype: torch.dtype, e4m3_max: int = 448) -> torch.Tensor:
        buffers = (self.data.to(device), self.scale.to(device), torch.tensor([amax], device=device))
        options = (self.layout, e4m3_max, self.columnwise)
        with poisoned_allocations():
            return ZEROFP4.dequantize(*buffers, self.block_rows, dtype, *options)

    def expected(self, amax: float, dtype: torch.dtype, e4m3_max: int = 448) -> torch.Tensor:
        scale = self.compact.view(torch.float8_e4m3fn)
        options = (self.block_rows, dtype, e4m3_max)
        values = reference.dequantize(self.data, scale, torch.tensor([amax]), *options)
        return values.t().contiguous() if self.columnwise else values


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", marked("threads", SHAPES + MORE_SHAPES, (256, 512), (80, 1032)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("columnwise", [False, True])
def test_every_code_and_scale(device, shape, dtype, block_rows, columnwise):
    if columnwise and shape[0] % 2:
        pytest.skip("columnwise data needs an even number of rows")
    expected = values_by_amax(shape, dtype, block_rows, columnwise)
    for layout in SCALE_LAYOUTS:
        case = Case(shape, block_rows, columnwise, layout)
        actual = torch.stack([case.run(device, amax, dtype) for amax in AMAXES])
        assert_values_equal(actual, expected, f"{layout}, by amax")


@functools.cache
def values_by_amax(shape, dtype, block_rows, columnwise) -> torch.Tensor:
    """Of Case, whatever the layout and the device."""
    case = Case(shape, block_rows, columnwise)
    return torch.stack([case.expected(amax, dtype) for amax in AMAXES])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_smaller_maximum_of_four_over_six(device, dtype, columnwise):
    case = Case((48, 264), 1, columnwise)
    for amax in AMAXES:
        actual, expected = case.run(device, amax, dtype, 256), case.expected(amax, dtype, 256)
        assert_values_equal(actual, expected, f"amax {amax}")


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("columnwise", [False, True])
def test_buffers_at_any_address(device, offset, columnwise):
    for layout in SCALE_LAYOUTS:
        case = Case((64, 512), 1, columnwise, layout)
        moved = [
            torch.empty(b.numel() + offset, dtype=b.dtype, device=device) for b in (case.data, case.scale)
        ]
        data, scale = (
            m[offset:].view(b.shape).copy_(b) for m, b in zip(moved, (case.data, case.scale), strict=True)
        )
        for dtype in DTYPES:
            amax = torch.tensor([3.7], device=device)
            with poisoned_allocations():
                actual = ZEROFP4.dequantize(data, scale, amax, 1, dtype, layout, 448, columnwise)
            assert_values_equal(actual, case.expected(3.7, dtype), f"{layout} {dtype}")


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_empty(device, shape, columnwise):
    result = Case(shape, 16, columnwise).run(device, 1.0, torch.bfloat16)
    assert result.shape == shape and result.dtype == torch.bfloat16


# Tensors


@pytest.mark.parametrize("options", [{}, {"block": (1, 16)}, {"four_over_six": zerofp4.FourOverSix()}])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_tensor_with_either_copy(device, options, dtype):
    x = torch.randn(6, 8, 80, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    for rowwise in (True, False):
        t = zerofp4.quantize(x, rowwise=rowwise, columnwise=True, **options)
        side = "rowwise" if rowwise else "columnwise"
        copy = getattr(t, f"{side}_data"), getattr(t, f"{side}_scale"), t.amax
        expected = reference.dequantize(*copy, t.block[0], e4m3_max=t.record.e4m3_max)
        expected = (expected if rowwise else expected.mT).reshape(x.shape)
        expected = expected.to(torch.bfloat16 if dtype is None else dtype)
        assert_bytes_equal(t.dequantize(dtype), expected, side)


def test_copy_of_the_transform_has_no_values(device):
    options = {"block": (1, 16), "columnwise": True, "hadamard": True}
    x = torch.randn(48, 80, device=device)
    assert zerofp4.quantize(x, **options).dequantize().shape == x.shape
    only = zerofp4.quantize(x, rowwise=False, **options)
    for call in (only.dequantize, lambda: zerofp4.dequantize_many([only])):
        with pytest.raises(ValueError, match="only a columnwise copy, of its Hadamard transform"):
            call()


# The operators in torch.library


@pytest.mark.heavy
def test_opcheck(device):
    for columnwise, *options in ((False,), (True, "compact", 256, True)):
        case = Case((32, 64), columnwise=columnwise)
        buffers = case.data.to(device), case.scale.to(device), torch.ones(1, device=device)
        torch.library.opcheck(ZEROFP4.dequantize.default, (*buffers, 16, torch.float16, *options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(34, 66), (0, 66), (3, 34, 66), (40, 18, 34)])
def test_values_are_written_to_given_memory(device, shape, dtype):
    """As memory that nobody has written to: no version counts it."""
    tensor = zerofp4.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device))
    side = tensor.record.rowwise
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    version = out._version
    ops.values_of(side.data, side.scales["compact"], side.amax, 16, 448, False, dtype, out)
    assert_bytes_equal(out, tensor.dequantize(dtype), "values")
    assert out._version == version
