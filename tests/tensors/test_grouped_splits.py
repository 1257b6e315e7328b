"""Splits of quantize_grouped: checked on the host, or found wrong by the kernels."""

import pytest
import torch
from cases.grouped import expected_storage, values
from cases.ops import POISON
from helpers import assert_bytes_equal

import zerofp4
from zerofp4.ops import grouped_shapes


def run_operator(x, splits):
    """The operator on poisoned buffers: what it does with splits that nobody checked."""
    shapes = grouped_shapes(x.shape[0], splits.numel(), x.shape[1])
    buffers = {name: torch.full(shape, POISON, dtype=torch.uint8) for name, shape in shapes.items()}
    buffers = {name: buffer.to(x.device) for name, buffer in buffers.items()}
    buffers["amax"] = torch.full((splits.numel(),), 7.0, device=x.device)
    buffers["columnwise_amax"] = None
    offsets = torch.full((3, splits.numel() + 1), -7, device=x.device)
    error = torch.full((1,), 9, dtype=torch.int32, device=x.device)
    arguments = (None, None, False, True, None, *buffers.values(), offsets, error)
    torch.ops.zerofp4.quantize_grouped(x, splits, *arguments)
    return buffers, offsets, error


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "splits",
    [
        [-16, 48, 32],
        [16, 16, 16],
        [32, 32, 1],
        [65, -1, 0],
        [2**31 - 1, 2**31 - 1, 66],
        [-(2**31), -(2**31), 64],
        [1] * 300,
        [64] + [0] * 500 + [-64, 64],
    ],
)
def test_invalid_splits_set_the_error_flag(device, splits, dtype):
    x = values([64], 48, device)
    buffers, offsets, error = run_operator(x, torch.tensor(splits, dtype=dtype, device=device))
    assert error.tolist() == [1] and not offsets.any()
    for name, buffer in buffers.items():
        assert buffer is None or not buffer.any(), name


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("splits", [[2**62, 2**62, 64], [-(2**63), -(2**63), 64]])
def test_large_invalid_splits(device, splits):
    x = values([64], 48, device)
    _, offsets, error = run_operator(x, torch.tensor(splits, device=device))
    assert error.tolist() == [1] and not offsets.any()


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unchecked_splits(device, dtype):
    splits = [10, 0, 54]
    x = values(splits, 48, device)
    buffers, offsets, error = run_operator(x, torch.tensor(splits, dtype=dtype, device=device))
    expected = expected_storage(x, splits)
    for name, buffer in buffers.items():
        if buffer is not None:
            assert_bytes_equal(buffer, expected[name].to(device), name)
    assert error.tolist() == [0]
    assert offsets.tolist() == [[0, 10, 10, 64], [0, 16, 16, 80], [0, 128, 128, 256]]


@pytest.mark.heavy
def test_check_raises_on_the_host(device):
    x = values([64], 48, device)
    zerofp4.quantize_grouped(x, [60, 4]).check()
    if device.type == "cuda":
        grouped = zerofp4.quantize_grouped(x, torch.tensor([60, 5], device=device))
    else:  # the host checks a CPU tensor, but not under torch.compile
        call = torch.compile(zerofp4.quantize_grouped, fullgraph=True, backend="eager")
        grouped = call(x, torch.tensor([60, 5]))
    with pytest.raises(ValueError, match=r"must sum to the 64 rows of x, got \[60, 5\]"):
        grouped.check()


def test_host_splits_survive_until_they_are_used(device):
    """The copy to the device is asynchronous: splits of later calls must not reach it."""
    x = values([64], 48, device)
    calls = [[group, 64 - group] for group in range(65)]
    grouped = [zerofp4.quantize_grouped(x, splits) for splits in calls]
    for splits, each in zip(calls, grouped, strict=True):
        assert each.offsets.tolist() == [0, splits[0], 64]
