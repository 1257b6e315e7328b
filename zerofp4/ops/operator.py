"""What all operators share: their registration and the checks of arguments that several take."""

import torch

from zerofp4.format import BLOCK, SCALE_DTYPE
from zerofp4.storage import check_buffer


def backend(name: str):
    """Registers a function as the CPU and the CUDA implementation of an operator."""
    return torch.library.impl(f"zerofp4::{name}", ("cpu", "cuda"))


def check_block_rows(block_rows: int) -> None:
    if block_rows not in (1, BLOCK):
        raise ValueError(f"block_rows must be 1 or {BLOCK}, got {block_rows}")


def check_bytes(
    name: str, buffer: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Floats of one byte may also come as their uint8 bytes: much of torch, opcheck included, lacks them."""
    raw = buffer.view(torch.uint8) if buffer.dtype == dtype else buffer
    check_buffer(name, raw, shape, torch.uint8, device)


def check_scale(name: str, scale: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    check_bytes(name, scale, shape, SCALE_DTYPE, device)


def check_amaxes(x, count: int, given_amax, given_columnwise_amax, hadamard, buffers) -> None:
    """Those given and those of the buffers, `count` of each: one, or one for every group."""
    for name, given in (("amax", given_amax), ("columnwise_amax", given_columnwise_amax)):
        if given is not None:
            check_buffer(name, given, (count,), torch.float32, x.device)
    if given_columnwise_amax is not None and not hadamard:
        raise ValueError(
            "columnwise_amax is that of the Hadamard transform, but hadamard is False: both copies have amax"
        )
    two = hadamard and buffers["rowwise_data"] is not None
    if given_amax is not None and hadamard and not two:
        raise ValueError("amax is that of the rowwise copy, but none is asked for: give columnwise_amax")
    check_buffer("amax", buffers["amax"], (count,), torch.float32, x.device)
    if two != (buffers["columnwise_amax"] is not None):
        raise ValueError("a second amax belongs to a rowwise copy with a transformed columnwise one, only")
    if two:
        check_buffer("columnwise_amax", buffers["columnwise_amax"], (count,), torch.float32, x.device)
