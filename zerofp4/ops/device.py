"""Where a call into the extension runs, and what this build can run."""

import functools

import torch

import zerofp4._C as _C
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.ops.hardware import FP4_CAPABILITY, check_capability
from zerofp4.storage import Side, address_of

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""What torch gives its own Triton kernels: the handle alone, a tenth of the time of a Stream object."""


@functools.cache
def check_cuda(index: int) -> None:
    """Raises RuntimeError unless this build and this GPU can run the CUDA kernels."""
    if "cuda_version" not in _C.build():
        raise RuntimeError(
            f"a tensor is on cuda:{index}, but zerofp4 was built without CUDA: "
            "reinstall it where nvcc is on the PATH"
        )
    gpu = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
    check_capability(gpu, torch.cuda.get_device_capability(index), architectures())


def architectures() -> list[str]:
    """Those that the build has code for: sm_90 is machine code, compute_90 PTX."""
    return _C.build().get("cuda_architectures", "").split()


_target = functools.lru_cache(maxsize=256)(_C.Target)
"""A target is three integers; to find one costs the host less than to make one."""


def target_of(device: torch.device) -> _C.Target:
    """The current stream of a GPU, or torch's number of threads."""
    if device.type == "cpu":
        return _target(-1, 0, torch.get_num_threads())
    if device.type != "cuda":
        raise RuntimeError(f"zerofp4 runs on CPU and CUDA tensors, not on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    check_cuda(index)
    return _target(index, current_stream(index), 0)


def current_stream(index: int) -> int:
    """The handle of a GPU's current stream."""
    return torch.cuda.current_stream(index).cuda_stream if _raw_stream is None else _raw_stream(index)


def has_fp4_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP4_CAPABILITY


def is_capturing(device: torch.device) -> bool:
    """Whether a GPU's current stream is being captured in a CUDA graph, whichever GPU is the current one."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):  # asked in every step: no context for nothing
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def data_address(name: str, side: Side | None) -> int:
    return 0 if side is None else address_of(name, side.data)


def scale_addresses(name: str, side: Side | None) -> list[int]:
    """Of the scales of a side of NVFP4 by layout, 0 where there is none."""
    scales = {} if side is None else side.scales
    return [address_of(name, scales.get(layout)) for layout in SCALE_LAYOUTS]
