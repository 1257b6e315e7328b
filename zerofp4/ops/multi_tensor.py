"""Launches that read a list of tensors of any dtypes: is there a NaN or Inf, the sums of squares, and float32
copies.
"""

from collections.abc import Sequence

import torch

import zerofp4._C as _C
from zerofp4.ops.average import SQUARES
from zerofp4.ops.device import DTYPE_CODES, target_of
from zerofp4.ops.tensor_lists import pointers, pointers_of
from zerofp4.storage import address_of, check_buffer


class MultiTensor:
    """Launches over contiguous tensors of one of format.WEIGHT_DTYPES each, which may move in between.

    tensors: None for those that there are not.
    words: of each tensor, above 0, for find_nonfinite().

    addresses: where they lie now, as of pointers() and TensorFacts. Whoever has made sure that lengths and
        dtypes are the same sets it before each launch.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], words: Sequence[int] | None = None):
        self.addresses = b""
        words = [0] * len(tensors) if words is None else words
        positions: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                positions.setdefault(tensor.dtype, []).append(i)
        self._lists = [
            _C.MultiTensorList(
                positions=own,
                numels=[tensors[i].numel() for i in own],
                words=[words[i] for i in own],
                dtype=DTYPE_CODES[dtype],
            )
            for dtype, own in positions.items()
        ]

    def find_nonfinite(
        self, found: torch.Tensor, when: torch.Tensor | None = None, flag: torch.Tensor | None = None
    ) -> None:
        """As the function. flag: float32 [], becomes 1 where a tensor holds a NaN or Inf."""
        flags = address_of("found", found), address_of("flag", flag), address_of("when", when)
        for own in self._lists:
            own.find_nonfinite(target_of(found.device), self.addresses, *flags)

    def add_squares(self, squares: torch.Tensor) -> None:
        """As the function."""
        check_buffer("squares", squares, SQUARES, torch.int64, squares.device)
        for own in self._lists:
            own.add_squares(target_of(squares.device), self.addresses, address_of("squares", squares))

    def widen(self, outputs: list[torch.Tensor]) -> None:
        """Copy each tensor to the output in its position: contiguous, float32, as long as the tensor and on
        its device. Outputs of tensors that are None keep their values.
        """
        addresses = pointers(outputs)
        for own in self._lists:
            own.widen(target_of(outputs[0].device), self.addresses, addresses)


def find_nonfinite(
    tensors: Sequence[torch.Tensor],
    words: Sequence[int],
    found: torch.Tensor,
    when: torch.Tensor | None = None,
) -> None:
    """Raise found[0], int32, to the largest word of a tensor that holds a NaN or Inf, in one pass over them.
    Waits for nothing.

    tensors: contiguous, of one of format.WEIGHT_DTYPES, on the device of `found`, whatever their dtypes.
    words: of each tensor, above 0.
    when: int64 [2] on the device: nothing is looked at where both are 0.
    """
    launches = MultiTensor(tensors, words)
    launches.addresses = pointers_of("tensors", tensors)
    launches.find_nonfinite(found, when)


def add_squares(tensors: Sequence[torch.Tensor], squares: torch.Tensor) -> None:
    """Add to `squares` what ops.average() adds for means that are these values, those of each tensor by
    themselves.

    tensors: contiguous, of one of format.WEIGHT_DTYPES, on the device of `squares`, whatever their dtypes.
    """
    launches = MultiTensor(tensors)
    launches.addresses = pointers_of("tensors", tensors)
    launches.add_squares(squares)
