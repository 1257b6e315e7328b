"""Records in NVFP4."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from zerofp4.format import BLOCK, E4M3_MAX, SCALE_DTYPE, SCALE_LAYOUTS, WEIGHT_DTYPES, FourOverSix
from zerofp4.layout import as_matrix, check_matrix, columnwise_rows, packed_shape, scale_shape
from zerofp4.storage.record import Storage, check_layouts, check_sides


@dataclasses.dataclass(eq=False)
class NVFP4Storage(Storage):
    """rowwise.data uint8 [M, K/2]; columnwise.data uint8 [K, M/2], the packed transpose; scales E4M3:
    compact, or expanded and swizzled, which are padded (layout.scale_shape); amaxes float32 [1], one
    tensor unless both copies exist and one of them is of the transform.
    """

    layouts: ClassVar = SCALE_LAYOUTS

    block: tuple[int, int]
    hadamard: bool = dataclasses.field(default=False, kw_only=True)
    """The columnwise copy is of the Hadamard transform along M: uint8 [K, round_up(M, 16)/2]."""
    random_signs: bool = dataclasses.field(default=True, kw_only=True)
    """The transform's; True where there is none."""
    four_over_six: FourOverSix | None = dataclasses.field(default=None, kw_only=True)

    @property
    def e4m3_max(self) -> int:
        """What dequantization divides by is 6 times this."""
        return int(E4M3_MAX) if self.four_over_six is None else self.four_over_six.e4m3_max

    @classmethod
    def buffer_dtype(cls, name: str) -> torch.dtype:
        return SCALE_DTYPE if "scale" in name else torch.float32 if "amax" in name else torch.uint8

    @classmethod
    def from_context(cls, shape, context) -> "NVFP4Storage":
        dtype, block, hadamard, random_signs, four_over_six = context
        record = cls(shape, dtype, tuple(block), hadamard=hadamard, random_signs=random_signs)
        record.four_over_six = None if four_over_six is None else FourOverSix(*four_over_six)
        return record

    def context(self) -> tuple:
        """(dtype, block, hadamard, random_signs, the fields of four_over_six or None)"""
        four_over_six = self.four_over_six and (self.four_over_six.e4m3_max, self.four_over_six.error)
        return self.dtype, self.block, self.hadamard, self.random_signs, four_over_six

    def check_context(self) -> None:
        super().check_context()
        for name in ("hadamard", "random_signs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        check_block(self.block)
        check_transform(self.block[0], self.columnwise is not None, self.hadamard, self.random_signs)
        check_matrix(*self.matrix, columnwise=self.columnwise is not None and not self.hadamard)

    def check(self) -> None:
        super().check()
        for name, side in self.sides():
            if side.amax is None:
                raise ValueError(f"the {name} copy has no amax")
        if not self.hadamard and self.columnwise_amax is not None and self.columnwise_amax is not self.amax:
            raise ValueError("columnwise_amax must be amax itself unless the columnwise copy is transformed")

    @property
    def scheme(self) -> tuple:
        return NVFP4Storage, self.shape, self.block, self.hadamard, self.random_signs, self.e4m3_max

    def side_matrix(self, side: str) -> tuple[int, int]:
        """(rows, cols) of the matrix that a side stores."""
        rows, cols = self.matrix
        return (rows, cols) if side == "rowwise" else (cols, columnwise_rows(rows, self.hadamard))

    def data_shape(self, side: str) -> tuple[int, int]:
        return packed_shape(*self.side_matrix(side))

    def scale_shape(self, side: str, layout: str) -> tuple[int, int]:
        return scale_shape(*self.side_matrix(side), self.block[0], layout)


def check_block(block: tuple[int, int]) -> None:
    if tuple(block) not in ((BLOCK, BLOCK), (1, BLOCK)):
        raise ValueError(f"block must be (16, 16) or (1, 16), got {tuple(block)}")


def check_transform(block_rows: int, columnwise: bool, hadamard: bool, random_signs: bool) -> None:
    """Raises ValueError for a transform that NVFP4 has not."""
    if not hadamard:
        if not random_signs:
            raise ValueError("random_signs=False says how hadamard transforms, but hadamard is False")
        return
    if block_rows != 1:
        raise ValueError(
            f"hadamard=True needs blocks of 1x16, got {block_rows}x16: both copies share the scale of a "
            "tile, and the transform is of the columnwise copy only"
        )
    if not columnwise:
        raise ValueError("hadamard=True transforms the columnwise copy, but none is asked for")


def allocate(
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    block: tuple[int, int] = (BLOCK, BLOCK),
    rowwise: bool = True,
    columnwise: bool = True,
    scale_layouts: Sequence[str] = ("compact",),
    hadamard: bool = False,
    random_signs: bool = True,
    four_over_six: FourOverSix | None = None,
) -> NVFP4Storage:
    """Uninitialized buffers for a tensor of `shape`.

    Raises TypeError for a dtype that cannot be quantized and ValueError for a shape, block, layout or
    transform that NVFP4 has not, or when neither copy is asked for.
    """
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
    check_block(block)
    sides = check_sides(rowwise, columnwise)
    check_transform(block[0], columnwise, hadamard, random_signs)
    layouts = check_layouts(scale_layouts)
    check_matrix(*as_matrix(shape), columnwise=columnwise and not hadamard)
    record = NVFP4Storage(
        torch.Size(shape),
        dtype,
        tuple(block),
        hadamard=hadamard,
        random_signs=random_signs,
        four_over_six=four_over_six,
    )
    amax = None
    for side in sides:
        if amax is None or hadamard:  # the transform has an amax of its own
            amax = torch.empty(1, dtype=torch.float32, device=device)
        record.allocate_side(side, layouts, device, amax)
    return record
