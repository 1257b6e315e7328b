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


def check_scale(name: str, scale: torch.Tensor, shape: tuple[int, int], device: torch.device) -> None:
    """E4M3 scales may also come as their uint8 bytes: much of torch, opcheck included, lacks float8."""
    raw = scale.view(torch.uint8) if scale.dtype == SCALE_DTYPE else scale
    check_buffer(name, raw, shape, torch.uint8, device)
