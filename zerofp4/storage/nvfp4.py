"""Records in NVFP4."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from zerofp4.format import BLOCK, E4M3_MAX, SCALE_DTYPE, WEIGHT_DTYPES, FourOverSix
from zerofp4.layout import as_matrix, check_matrix, columnwise_rows, scale_shape, stacked_matrices
from zerofp4.storage.record import Storage, check_layouts, check_sides, unstack


@dataclasses.dataclass(eq=False)
class NVFP4Storage(Storage):
    """rowwise.data uint8 [M, K/2]; columnwise.data uint8 [K, M/2], the packed transpose; scales E4M3:
    compact, or expanded and swizzled, which are padded (layout.scale_shape); amaxes float32 [1], one tensor
    unless the columnwise copy is of the transform. A shape [E, N, K] in blocks of 16x16, or `stacked`, is a
    stack of E matrices [N, K], each quantized alone: every buffer has E as its first dimension.
    """

    context_fields: ClassVar = ("dtype", "block", "hadamard", "random_signs", "four_over_six", "stacked")

    block: tuple[int, int]
    hadamard: bool = dataclasses.field(default=False, kw_only=True)
    """The columnwise copy is of the Hadamard transform along M: uint8 [K, round_up(M, 16)/2]."""
    random_signs: bool = dataclasses.field(default=True, kw_only=True)
    """The transform's; True without one."""
    four_over_six: FourOverSix | None = dataclasses.field(default=None, kw_only=True)
    stacked: bool = dataclasses.field(default=False, kw_only=True)
    """Whether [E, N, K] in blocks of 1x16 is a stack."""

    @property
    def e4m3_max(self) -> int:
        """Dequantization divides by 6 times this."""
        return int(E4M3_MAX) if self.four_over_six is None else self.four_over_six.e4m3_max

    def values_source(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, bool]:
        """(data, compact scale, amax, block_rows, e4m3_max, columnwise) of the copy that gives the values.
        Raises ValueError where there is none but a columnwise copy of the transform.
        """
        copy = self.rowwise or self.columnwise
        columnwise = self.rowwise is None
        if columnwise and self.hadamard:
            raise ValueError(
                "this tensor has only a columnwise copy, of its Hadamard transform, which does not give its "
                "values: quantize with rowwise=True"
            )
        return copy.data, copy.scales["compact"], copy.amax, self.block[0], self.e4m3_max, columnwise

    @classmethod
    def buffer_dtype(cls, name: str) -> torch.dtype:
        return SCALE_DTYPE if "scale" in name else torch.float32 if "amax" in name else torch.uint8

    @classmethod
    def from_context(cls, shape, context) -> "NVFP4Storage":
        dtype, block, hadamard, random_signs, choice, *stacked = context  # of a checkpoint without it
        if choice is not None and not isinstance(choice, FourOverSix):
            choice = FourOverSix(*choice)
        options = {"hadamard": hadamard, "random_signs": random_signs, "four_over_six": choice}
        return cls(shape, dtype, tuple(block), **options, stacked=stacked == [True])

    def context(self) -> tuple:
        """(dtype, block, hadamard, random_signs, the fields of four_over_six or None, stacked)"""
        four_over_six = self.four_over_six and (self.four_over_six.e4m3_max, self.four_over_six.error)
        return self.dtype, self.block, self.hadamard, self.random_signs, four_over_six, self.stacked

    def check_context(self) -> None:
        super().check_context()
        check_block(self.block)
        check_stacked(self.stacked, self.hadamard)
        stacked_matrices(self.shape, self.block[0], self.stacked)
        check_transform(self.block[0], self.columnwise is not None, self.hadamard, self.random_signs)
        check_matrix(*self.matrix, columnwise=self.columnwise is not None and not self.hadamard)

    def check(self) -> None:
        super().check()
        for name, side in self.sides():
            if side.amax is None:
                raise ValueError(f"the {name} copy has no amax")

    @property
    def scheme(self) -> tuple:
        transform = self.hadamard, self.random_signs
        return NVFP4Storage, self.shape, self.block, self.experts, *transform, self.e4m3_max

    @property
    def scales_travel(self) -> bool:
        """Whether a cast gathers compact rowwise scales, of which a rank computes its blocks' alone."""
        return self.block[0] == 1 or self.four_over_six is not None

    @property
    def experts(self) -> int | None:
        """E of a stack [E, N, K]; None for one matrix."""
        is_stack = len(self.shape) == 3 and (self.stacked or self.block[0] == BLOCK)
        return self.shape[0] if is_stack else None

    @property
    def matrix(self) -> tuple[int, int]:
        """(M, K), of each matrix of a stack."""
        return as_matrix(self.shape if self.experts is None else self.shape[1:])

    @property
    def amax_shape(self) -> tuple[int]:
        return (1 if self.experts is None else self.shape[0],)

    def matrices(self, only: int | None = None) -> list["NVFP4Storage"]:
        """The record itself; of a stack, a record of each matrix, or of number `only`, over views."""
        if self.experts is None:
            return [self]
        records = []
        first, count = (0, self.shape[0]) if only is None else (only, 1)
        for e, sides in enumerate(unstack(self, count, first), first):
            record = self.from_context(self.shape[1:], self.context()[:-1])
            record.rowwise, record.columnwise = sides.rowwise, sides.columnwise
            record.name = None if self.name is None else f"{self.name}[{e}]"
            records.append(record)
        return records

    def side_matrix(self, side: str) -> tuple[int, int]:
        """(rows, cols) of the matrix that a side stores, or of each matrix of a stack."""
        rows, cols = self.matrix
        return (rows, cols) if side == "rowwise" else (cols, columnwise_rows(rows, self.hadamard))

    def data_shape(self, side: str) -> tuple[int, ...]:
        rows, cols = self.side_matrix(side)
        return self._stacked((rows, cols // 2))

    def scale_shape(self, side: str, layout: str) -> tuple[int, ...]:
        return self._stacked(scale_shape(*self.side_matrix(side), self.block[0], layout))

    def _stacked(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return shape if self.experts is None else (self.shape[0], *shape)


def check_block(block: tuple[int, int]) -> None:
    if tuple(block) not in ((BLOCK, BLOCK), (1, BLOCK)):
        raise ValueError(f"block must be (16, 16) or (1, 16), got {tuple(block)}")


def check_transform(block_rows: int, columnwise: bool, hadamard: bool, random_signs: bool) -> None:
    """Raises ValueError for a transform that NVFP4 does not have."""
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


def check_stacked(stacked: bool, hadamard: bool) -> None:
    if stacked and hadamard:
        raise ValueError("stacked=True is for weights, and hadamard=True for activations and gradients")


def check_rounding(stochastic: bool, four_over_six: FourOverSix | None) -> None:
    """Raises TypeError for what is no choice of scales, ValueError for one that rounding excludes."""
    if not isinstance(four_over_six, FourOverSix | None):
        raise TypeError(f"four_over_six must be a FourOverSix or None, got {type(four_over_six).__name__}")
    if stochastic and four_over_six is not None:
        raise ValueError(
            "stochastic rounding and four over six exclude each other: the choice of a block's scale "
            "compares the errors of rounding to nearest"
        )


class Scheme(NamedTuple):
    """How tensors are quantized in NVFP4, and which buffers they get. quantize describes the options."""

    block: tuple[int, int] = (BLOCK, BLOCK)
    rowwise: bool = True
    columnwise: bool = False
    scale_layouts: Sequence[str] = ("compact",)
    hadamard: bool = False
    random_signs: bool = True
    four_over_six: FourOverSix | None = None
    stochastic_rounding: bool = False
    stacked: bool = False

    @classmethod
    def checked(cls, **options: Any) -> "Scheme":
        """Raises TypeError for an option of a wrong type, ValueError for options that NVFP4 does not have."""
        given = cls(**options)
        check_block(given.block)
        check_sides(given.rowwise, given.columnwise)
        check_transform(given.block[0], given.columnwise, given.hadamard, given.random_signs)
        check_stacked(given.stacked, given.hadamard)
        check_rounding(given.stochastic_rounding, given.four_over_six)
        layouts = check_layouts(given.scale_layouts)
        return cls(**options | {"block": tuple(given.block), "scale_layouts": layouts})

    @property
    def of_records(self) -> dict[str, Any]:
        """Fields of records."""
        of_records = {name: getattr(self, name) for name in NVFP4Storage.context_fields[1:]}
        return of_records | {"stacked": self.stacked and self.block[0] == 1}

    @property
    def sides(self) -> list[str]:
        return check_sides(self.rowwise, self.columnwise)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> NVFP4Storage:
        """Uninitialized buffers for a tensor of `shape`. Raises TypeError for a dtype that cannot be
        quantized, ValueError for a shape that NVFP4 cannot hold.
        """
        if dtype not in WEIGHT_DTYPES:
            raise TypeError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype}")
        stacked_matrices(shape, self.block[0], self.stacked)
        record = NVFP4Storage(torch.Size(shape), dtype, **self.of_records)
        check_matrix(*record.matrix, columnwise=self.columnwise and not self.hadamard)
        amax = None
        for side in self.sides:
            if amax is None or self.hadamard:  # the transform has an amax of its own
                amax = torch.empty(record.amax_shape, dtype=torch.float32, device=device)
            record.allocate_side(side, self.scale_layouts, device, amax)
        return record
