"""dequantize_many of tensors of both formats."""

import pytest
import torch
from cases.ops import DTYPES, marked
from helpers import assert_all_equal, assert_bytes_equal, poisoned_allocations

import zerofp4
from zerofp4 import ops

SHAPES = [(48, 80), (2, 2, 34), (0, 16), (130, 264), (16, 512), (33, 2056)]
MXFP8_OPTIONS = [
    {},
    {"rowwise": False, "columnwise": True},
    {"columnwise": True, "scale_layouts": ("swizzled",)},
    {"rowwise": False, "columnwise": True, "scale_layouts": ("swizzled",)},
]


def nvfp4_tensors(device, count: int, dtypes=DTYPES) -> list:
    """Of several shapes (an empty one too), dtypes, blocks and copies."""
    options = [
        {},
        {"block": (1, 16)},
        {"rowwise": False, "columnwise": True},
        {"rowwise": False, "columnwise": True, "block": (1, 16)},
        {"four_over_six": zerofp4.FourOverSix()},
        {"scale_layouts": ("swizzled",)},
    ]
    tensors = []
    for i in range(count):
        x = torch.randn(SHAPES[i % 5], generator=torch.Generator().manual_seed(i))
        tensors.append(zerofp4.quantize(x.to(device, dtypes[i % len(dtypes)]), **options[i % 6]))
    return tensors


def mxfp8_tensors(device, count: int, dtypes=DTYPES) -> list:
    """Of several shapes (an empty one too), dtypes and copies."""
    tensors = []
    for i in range(count):
        x = torch.randn(SHAPES[i % 6], generator=torch.Generator().manual_seed(i))
        x = x.to(device, dtypes[i % len(dtypes)])
        tensors.append(zerofp4.quantize_mxfp8(x, **MXFP8_OPTIONS[i // 2 % 4]))
    return tensors


def mixed_tensors(device, count: int, dtypes=DTYPES) -> list:
    """Every other one in NVFP4."""
    tensors = mxfp8_tensors(device, count, dtypes)
    for i in range(0, count, 2):
        tensors[i] = zerofp4.quantize(tensors[i].dequantize())
    return tensors


@pytest.mark.parametrize("make", [nvfp4_tensors, mxfp8_tensors, mixed_tensors])
@pytest.mark.parametrize("count", marked("threads", [0, 1, 2, 32, 33, 67, 1100], 33))
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_equal_one_by_one(device, make, count, dtype):
    tensors = make(device, count)
    with poisoned_allocations():
        values = zerofp4.dequantize_many(tensors, dtype)
    for i, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
        assert type(value) is torch.Tensor
        assert_bytes_equal(value, tensor.dequantize(dtype), f"tensor {i}, {tuple(tensor.shape)}")


@pytest.mark.parametrize(("dtype", "launches"), [(None, 5), (torch.float16, 2)])
def test_one_launch_for_a_format_and_dtype(device, dtype, launches, monkeypatch):
    tensors, found, run = mixed_tensors(device, 40), [], ops.dequantize.run_list
    monkeypatch.setattr(ops.dequantize, "run_list", lambda make, *of: (found.append(make), run(make, *of)))
    zerofp4.dequantize_many(tensors, dtype)
    assert len(found) == launches  # one kind has only tensors without elements


def test_graph_capture(device):
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    tensors = mixed_tensors(device, 100)  # in several launches
    expected = [t.dequantize(torch.bfloat16) for t in tensors]
    empty = zerofp4.quantize_mxfp8(torch.empty(0, 16, device=device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = zerofp4.dequantize_many(tensors, torch.bfloat16)
        assert [v.shape for v in zerofp4.dequantize_many([empty] * 40)] == [(0, 16)] * 40
    graph.replay()
    assert_all_equal(values, expected, "tensor")


@pytest.mark.heavy
def test_compiles_without_a_break(device):
    def use(*tensors):
        return [2 * value for value in zerofp4.dequantize_many(tensors)]

    torch._dynamo.reset()
    tensors = mixed_tensors(device, 6)
    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    assert_all_equal(compiled(*tensors), use(*tensors), "compiled")


def test_refuses():
    tensors = mixed_tensors("cpu", 2)
    with pytest.raises(TypeError, match=r"tensors\[2\] must be an NVFP4Tensor or an MXFP8Tensor, got Tensor"):
        zerofp4.dequantize_many([*tensors, torch.zeros(16, 16)])
    with pytest.raises(TypeError, match=r"dtype must be one of .*float64"):
        zerofp4.dequantize_many(tensors, torch.float64)
    with pytest.raises(ValueError, match=r"tensors\[1\] must be on cpu, as the first is, got meta"):
        zerofp4.dequantize_many([tensors[0], tensors[1].to("meta")])
