"""Records in MXFP8."""

import dataclasses
from typing import ClassVar

import torch

from zerofp4.format import MXFP8_BLOCK, MXFP8_DATA_DTYPE, MXFP8_SCALE_DTYPE
from zerofp4.layout import mxfp8_scale_shape
from zerofp4.storage.record import Storage


@dataclasses.dataclass(eq=False)
class MXFP8Storage(Storage):
    """rowwise.data and columnwise.data E4M3 [M, K], the latter not transposed; compact scales E8M0, rowwise
    [M, ceil(K/32)] and columnwise [ceil(M/32), K]; swizzled ones padded (layout.mxfp8_scale_shape).
    """

    context_fields: ClassVar = ("dtype",)
    block: ClassVar[tuple[int, int]] = (1, MXFP8_BLOCK)

    def values_source(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """(data, compact scale, columnwise) of the copy that gives the values."""
        copy = self.rowwise or self.columnwise
        return copy.data, copy.scales["compact"], self.rowwise is None

    @classmethod
    def buffer_dtype(cls, name: str) -> torch.dtype:
        return MXFP8_SCALE_DTYPE if "scale" in name else MXFP8_DATA_DTYPE

    @property
    def scheme(self) -> tuple:
        return MXFP8Storage, self.shape

    def data_shape(self, side: str) -> tuple[int, int]:
        return self.matrix

    def scale_shape(self, side: str, layout: str) -> tuple[int, int]:
        return mxfp8_scale_shape(*self.matrix, side == "columnwise", layout)
