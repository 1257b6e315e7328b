"""Masters of 24 bits: the planes that they are kept in, bfloat16 and bytes, and their float32 values."""

from collections.abc import Iterator

import torch

from zerofp4.reference import join_master, round_master, split_master

CHUNK = 2**22
"""Elements that are converted at once: the arithmetic takes many times their memory."""

NEAREST = 128
"""In place of a random byte: a master that no update has made is the value of 24 bits next to what it was."""


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """float32 values of masters, 1D. high: bfloat16. low: uint8."""
    values = torch.empty(high.shape, dtype=torch.float32, device=high.device)
    for part in _chunks(values):
        values[part] = join_master(high[part], low[part])
    return values


def write_master(values: torch.Tensor, master: torch.Tensor, low: torch.Tensor | None = None) -> None:
    """Write float32 values, 1D, into a master: float32, or with `low` the planes of 24 bits. Values that 24
    bits hold stay what they are.
    """
    if low is None:
        master.copy_(values)
        return
    nearest = torch.tensor(NEAREST, device=master.device)
    for part in _chunks(master):
        master[part], low[part] = split_master(round_master(values[part].to(master.device).float(), nearest))


def _chunks(tensor: torch.Tensor) -> Iterator[slice]:
    return (slice(first, first + CHUNK) for first in range(0, tensor.numel(), CHUNK))
