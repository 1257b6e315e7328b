"""The operators of groups of rows in torch.library, under torch.compile and in CUDA graphs."""

import pytest
import torch
from cases.grouped import assert_storage, values
from helpers import assert_all_equal, nothing_waits

import zerofp4
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.ops import grouped_shapes
from zerofp4.storage import BUFFERS


def operator_arguments(device, hadamard):
    x = values([10, 0, 54], 48, device)
    splits = torch.tensor([10, 0, 54], device=device)
    shapes = grouped_shapes(64, 3, 48)
    buffers = [torch.zeros(shapes[name], dtype=torch.uint8, device=device) for name in BUFFERS[:8]]
    amaxes = [torch.zeros(3, device=device), torch.zeros(3, device=device) if hadamard else None]
    offsets = torch.zeros((3, 4), dtype=torch.int64, device=device)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    return (x, splits, None, None, hadamard, True, None, *buffers, *amaxes, offsets, error)


@pytest.mark.heavy
@pytest.mark.parametrize("hadamard", [False, True])
def test_opcheck(device, hadamard):
    arguments = operator_arguments(device, hadamard)
    torch.library.opcheck(torch.ops.zerofp4.quantize_grouped.default, arguments)


def test_splits_of_another_dtype_are_refused():
    x, _, *others = operator_arguments(torch.device("cpu"), True)
    with pytest.raises(ValueError, match="m_splits must be a vector of int32 or int64"):
        torch.ops.zerofp4.quantize_grouped(x, torch.zeros(3), *others)


@pytest.mark.heavy
@pytest.mark.parametrize("splits", ["list", "tensor"])
def test_compiles_without_a_break(device, splits):
    options = {"columnwise": True, "hadamard": True, "scale_layouts": SCALE_LAYOUTS}
    sizes = [10, 0, 54] if splits == "list" else torch.tensor([10, 0, 54], device=device)

    def use(x):
        grouped = zerofp4.quantize_grouped(x * 2, sizes, **options)
        return grouped, grouped.rowwise_data + 1, grouped.data_offsets * 2

    x = values([10, 0, 54], 48, device)
    grouped, *rest = torch.compile(use, fullgraph=True, backend="aot_eager")(x)
    assert_storage(grouped, x * 2, [10, 0, 54], "compiled")
    assert_all_equal(rest, use(x)[1:], "compiled")


def test_does_not_synchronize_and_can_be_captured(device):
    if device.type != "cuda":
        pytest.skip("a CPU has nothing to synchronize with, and no graphs")
    options = {"columnwise": True, "hadamard": True, "scale_layouts": SCALE_LAYOUTS}
    x, splits = values([100, 28, 0], 144, device), torch.tensor([100, 28, 0], device=device)
    with nothing_waits():
        zerofp4.quantize_grouped(x, splits, **options)
        zerofp4.quantize_grouped(x, [100, 28, 0], **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped = zerofp4.quantize_grouped(x, splits, **options)
        with pytest.raises(RuntimeError, match="m_splits must be on x's device"):
            zerofp4.quantize_grouped(x, [100, 28, 0], **options)
    for sizes in ([100, 28, 0], [0, 1, 127], [128, 0, 0]):
        splits.copy_(torch.tensor(sizes))
        x.copy_(values(sizes, 144, device, seed=sizes[0]))
        graph.replay()
        assert_storage(grouped, x, sizes, f"replayed {sizes}")
    splits.fill_(3)
    graph.replay()
    with pytest.raises(ValueError, match="must sum to the 128 rows of x"):
        grouped.check()
    assert not grouped.rowwise_data.any() and not grouped.offsets.any()
