"""The packed transpose against the specification, byte for byte; operators together; what a build has."""

import pytest
import torch
from cases.ops import marked
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import ops, reference

ZEROFP4 = torch.ops.zerofp4

# transpose


# From one code pair to several of a GPU's tiles of 256 x 256 in both directions, whole and cut.
TRANSPOSED = [(2, 2), (16, 16), (18, 30), (130, 144), (34, 1030), (768, 512), (600, 1032), (1030, 514)]


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", marked("threads", TRANSPOSED, (768, 512), (1030, 514)))
def test_transpose_packed(device, shape):
    data = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8).to(device)
    assert_bytes_equal(ZEROFP4.transpose_packed(data), reference.transpose_packed(data), f"{shape}")


# The operators in torch.library


@pytest.mark.heavy
def test_opcheck(device):
    data = torch.randint(256, (32, 24), dtype=torch.uint8).to(device)
    torch.library.opcheck(ZEROFP4.transpose_packed.default, (data,))


def test_odd_rows_have_no_transpose():
    with pytest.raises(ValueError, match="rows must be even, got 3"):
        ZEROFP4.transpose_packed(torch.zeros(3, 4, dtype=torch.uint8))


def test_build_info_says_what_runs():
    info = zerofp4.build_info()
    assert info["cpu"]["running"] in info["cpu"]["compiled"]
    assert info["cuda"]["compiled"] == (info["cuda"]["version"] is not None)


@pytest.mark.skipif(zerofp4.build_info()["cuda"]["compiled"], reason="this build has CUDA")
def test_build_without_cuda_refuses_cuda_tensors():
    with pytest.raises(RuntimeError, match="built without CUDA: reinstall it where nvcc is on the PATH"):
        ops.check_cuda(0)
