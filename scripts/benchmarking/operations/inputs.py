"""What operations on single tensors are measured on."""

from typing import NamedTuple

import torch

import zerofp4
from benchmarking.session import Session
from zerofp4.ops.device import target_of
from zerofp4.ops.quantize import _amax_pass

ACTIVATION, WEIGHT = (1, 16), (16, 16)
"""Blocks."""


class Input(NamedTuple):
    """Normal values in bfloat16, and the amaxes of these and of their Hadamard transform."""

    x: torch.Tensor
    amax: torch.Tensor
    columnwise_amax: torch.Tensor

    @property
    def amaxes(self) -> dict[str, torch.Tensor]:
        """What quantize with hadamard takes."""
        return {"amax": self.amax, "columnwise_amax": self.columnwise_amax}


def values(session: Session, shape: tuple[int, int]) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.bfloat16, device=session.device)


def make_input(session: Session, shape: tuple[int, int]) -> Input:
    x = values(session, shape)
    amax, columnwise_amax = (torch.empty(1, dtype=torch.float32, device=x.device) for _ in range(2))
    amax_pass(x, amax, columnwise_amax)
    return Input(x, amax, columnwise_amax)


def amax_pass(x: torch.Tensor, amax: torch.Tensor | None, hadamard_amax: torch.Tensor | None) -> None:
    """The pass over x that quantize makes for amaxes that it is not given; no public function is it alone."""
    _amax_pass(target_of(x.device), x, True, None, amax, hadamard_amax)


def without_compact_scales(tensor: zerofp4.NVFP4Tensor) -> zerofp4.NVFP4Tensor:
    """The tensor with its padded scales only, as the operators can write it and quantize() does not."""
    for _, side in tensor.record.sides():
        del side.scales["compact"]
    return tensor
