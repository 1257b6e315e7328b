"""Which GPUs the code of a build runs on, and whose CUDA runtime it uses."""

import ctypes

import pytest

from zerofp4 import _C
from zerofp4.ops import check_capability, code_for

ARCHITECTURES = ["sm_80", "sm_90", "sm_100f", "sm_120f", "compute_90"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100f"),
        ((12, 1), "sm_120f"),
        ((13, 0), "compute_90"),
    ],
)
def test_code_for_a_capability(capability, expected):
    assert code_for(capability, ARCHITECTURES) == expected


def test_a_gpu_without_code_is_refused():
    check_capability("cuda:0", (9, 0), ["sm_90"])
    with pytest.raises(
        RuntimeError, match=r"built for sm_90, compute_90, cuda:1 \(A100\) has 8\.0: reinstall"
    ):
        check_capability("cuda:1 (A100)", (8, 0), ["sm_90", "compute_90"])
    with pytest.raises(RuntimeError, match=r"needs compute capability 8\.0 or newer, cuda:0 has 7\.5"):
        check_capability("cuda:0", (7, 5), ARCHITECTURES)


def test_the_cuda_runtime_is_the_extensions_own():
    """Linked in, and hidden: torch's check of its next launch does not find an error of ours once more."""
    library = ctypes.CDLL(_C.__file__)
    assert hasattr(library, "PyInit__C")
    for name in ("cudaGetLastError", "cudaLaunchKernelExC", "cudaGetDevice"):
        assert not hasattr(library, name), name
