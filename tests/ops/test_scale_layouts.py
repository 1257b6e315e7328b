"""Compact scales to the padded layouts and back on every backend, byte for byte; one scale and lists."""

import pytest
import torch
from cases.ops import SHAPES, in_layout, marked, random_bytes
from helpers import assert_all_equal, assert_bytes_equal, nothing_waits, poisoned_allocations

import zerofp4
from zerofp4 import ops, reference
from zerofp4.format import SCALE_DTYPE, SCALE_LAYOUTS
from zerofp4.layout import scale_shape

ZEROFP4 = torch.ops.zerofp4

# Whole chunks of 16 columns as well, in one tile of 128 and in several.
MORE_SHAPES = [(300, 256), (128, 2048), (130, 4352), (1, 4096)]


def compact_scale(shape, block_rows: int, seed: int = 0) -> torch.Tensor:
    return random_bytes(scale_shape(*shape, block_rows), seed, 0x7E).view(SCALE_DTYPE)


def padded_scale(compact: torch.Tensor, shape, block_rows: int, layout: str) -> torch.Tensor:
    expanded = reference.expand_scale(compact, *shape, block_rows)
    return expanded if layout == "expanded" else reference.swizzle_scale(expanded)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", marked("threads", SHAPES + MORE_SHAPES, (257, 66), (130, 4352)))
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_there_and_back(device, shape, block_rows, layout):
    compact = compact_scale(shape, block_rows)
    with poisoned_allocations():
        padded = ZEROFP4.pad_scale(compact.to(device), *shape, block_rows, layout)
        back = ZEROFP4.unpad_scale(padded, *shape, block_rows, layout)
    assert_bytes_equal(padded, padded_scale(compact, shape, block_rows, layout), layout)
    assert_bytes_equal(back, compact, "back")


@pytest.mark.parametrize("shape", [(130, 144), (1, 2), (257, 2064)])
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_padding_is_not_read(device, shape, block_rows, layout):
    """0xFF in the padding of a padded scale changes nothing."""
    compact = compact_scale(shape, block_rows)
    padded = in_layout(compact.view(torch.uint8), *shape, block_rows, layout).to(device)
    actual = ZEROFP4.unpad_scale(padded.view(SCALE_DTYPE), *shape, block_rows, layout)
    assert_bytes_equal(actual, compact, layout)


@pytest.mark.parametrize("offset", [1, 4, 8])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS[1:])
def test_buffers_at_any_address(device, offset, layout):
    shape = (256, 1024)
    compact = compact_scale(shape, 1).view(torch.uint8)
    padded = padded_scale(compact, shape, 1, layout)
    for operator, source, expected in (("pad", compact, padded), ("unpad", padded, compact)):
        moved = torch.empty(source.numel() + offset, dtype=torch.uint8, device=device)[offset:]
        moved = moved.view(source.shape).copy_(source)
        actual = getattr(ZEROFP4, f"{operator}_scale")(moved, *shape, 1, layout)
        assert_bytes_equal(actual, expected, operator)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_empty(device, shape):
    for layout in SCALE_LAYOUTS[1:]:
        padded = ZEROFP4.pad_scale(compact_scale(shape, 16).to(device), *shape, 16, layout)
        assert tuple(padded.shape) == scale_shape(*shape, 16, layout)
        assert ZEROFP4.unpad_scale(padded, *shape, 16, layout).numel() == 0


# Lists


@pytest.mark.parametrize("count", marked("threads", [1, 2, 32, 33, 100, 1100], 33))
def test_many_equal_one_by_one(device, count):
    shapes = [(SHAPES + MORE_SHAPES + [(0, 16)])[i % 15] for i in range(count)]
    blocks = [(1, 16)[i % 2] for i in range(count)]
    compact = [compact_scale(shapes[i], blocks[i], i).to(device) for i in range(count)]
    for layout in SCALE_LAYOUTS[1:]:
        matrices = ([m for m, _ in shapes], [k for _, k in shapes], blocks)
        padded = ops.change_scales(compact, *matrices, layout, True)
        back = ops.change_scales(padded, *matrices, layout, False)
        for i in range(count):
            expected = padded_scale(compact[i].cpu(), shapes[i], blocks[i], layout)
            assert_bytes_equal(padded[i], expected, f"{layout} {i}, {shapes[i]}")
            assert_bytes_equal(back[i], compact[i], f"{layout} {i} back, {shapes[i]}")


@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("count", [1, 33, 100])
def test_many_of_few_shapes(device, count, block_rows):
    """They share storages, where compact sizes are multiples of 16 bytes and where they are not; lists of
    scales and of their bytes give what they came as.
    """
    shapes = [[(32, 128), (33, 40), (0, 16), (256, 64)][i % 4] for i in range(count)]
    compact = [compact_scale(shape, block_rows, i).to(device) for i, shape in enumerate(shapes)]
    given = [scale.view(torch.uint8) if i % 3 == 2 else scale for i, scale in enumerate(compact)]
    for scales in (compact, given):
        with poisoned_allocations():
            swizzled = zerofp4.swizzle_scales(list(zip(scales, shapes, strict=True)))
            back = zerofp4.unswizzle_scales(list(zip(swizzled, shapes, strict=True)), block=(block_rows, 16))
        for i, shape in enumerate(shapes):
            assert swizzled[i].dtype == back[i].dtype == scales[i].dtype
            expected = padded_scale(compact[i].cpu(), shape, block_rows, "swizzled").view(torch.uint8)
            assert_bytes_equal(swizzled[i].view(torch.uint8), expected, f"{i}, {shape}")
            assert_bytes_equal(back[i], scales[i], f"{i} back, {shape}")


def test_swizzle_scales_of_tensors(device):
    x = [torch.randn(m, k, device=device) for m, k in ((48, 80), (130, 32), (16, 16))]
    tensors = [
        zerofp4.quantize(x[0], columnwise=True),
        zerofp4.quantize(x[1], block=(1, 16), columnwise=True),
        zerofp4.quantize(x[2], columnwise=True, scale_layouts=("swizzled",)),
    ]
    for columnwise in (False, True):
        for tensor, scale in zip(
            tensors, zerofp4.swizzle_scales(tensors, columnwise=columnwise), strict=True
        ):
            assert_bytes_equal(scale, tensor.swizzled_scale(columnwise), f"columnwise {columnwise}")
    assert zerofp4.swizzle_scales(tensors)[2] is tensors[2].rowwise_scale_swizzled
    assert zerofp4.swizzle_scales([]) == zerofp4.unswizzle_scales([]) == []
    compact = zerofp4.unswizzle_scales(tensors[2:], columnwise=True)
    assert_bytes_equal(compact[0], tensors[2].columnwise_scale, "back")


def test_lists_do_not_synchronize_and_can_be_captured(device):
    if device.type != "cuda":
        pytest.skip("a CPU has nothing to synchronize with, and no graphs")
    pairs = [(compact_scale((64, 96), 16, i).to(device), (64, 96)) for i in range(100)]
    with nothing_waits():
        expected = zerofp4.swizzle_scales(pairs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swizzled = zerofp4.swizzle_scales(pairs)  # in several launches
    graph.replay()
    for i, scale in enumerate(swizzled):
        assert_bytes_equal(scale, expected[i], f"scale {i}")


def test_list_functions_refuse(device):
    tensor = zerofp4.quantize(torch.randn(32, 48, device=device))
    swizzled = tensor.swizzled_scale()
    for call, error, message in [
        (lambda: zerofp4.swizzle_scales([tensor], columnwise=True), ValueError, r"scales\[0\] is .* no col"),
        (
            lambda: zerofp4.swizzle_scales([tensor, swizzled]),
            TypeError,
            r"scales\[1\] must be an NVFP4Tensor",
        ),
        (lambda: zerofp4.swizzle_scales([(swizzled, (32, 48))]), ValueError, r"shape \(32, 3\) or \(2, 3\)"),
        (lambda: zerofp4.unswizzle_scales([tensor]), ValueError, "no persistent swizzled rowwise scales"),
        (lambda: zerofp4.unswizzle_scales([(swizzled, (300, 48))]), ValueError, r"shape \(384, 4\)"),
        (lambda: zerofp4.unswizzle_scales([], block=(4, 4)), ValueError, "block must be"),
    ]:
        with pytest.raises(error, match=message):
            call()


# The operators in torch.library


@pytest.mark.heavy
def test_opcheck(device):
    for kind, layout in (("pad", "compact"), ("unpad", "swizzled")):
        scale = in_layout(compact_scale((32, 48), 16).view(torch.uint8), 32, 48, 16, layout).to(device)
        torch.library.opcheck(getattr(ZEROFP4, f"{kind}_scale").default, (scale, 32, 48, 16, "swizzled"))


@pytest.mark.heavy
def test_compiles_without_a_break(device):
    tensors = [zerofp4.quantize(torch.randn(32, 48, device=device)) for _ in range(3)]

    def use(*tensors):
        swizzled = zerofp4.swizzle_scales(tensors)
        pairs = list(zip(swizzled, [(32, 48)] * 3, strict=True))
        return [scale.view(torch.uint8) + 1 for scale in (*swizzled, *zerofp4.unswizzle_scales(pairs))]

    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    assert_all_equal(compiled(*tensors), use(*tensors), "compiled")
