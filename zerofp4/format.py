"""The constants of NVFP4 and MXFP8: element and scale formats, block sizes, scale layouts, options."""

import dataclasses

import torch

BLOCK = 16
"""Elements of a scaling block along a row; under 2D scaling a block is a BLOCK x BLOCK tile."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; bit 3 of a code is the sign."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
FLOAT32_MAX = torch.finfo(torch.float32).max

SCALE_DTYPE = torch.float8_e4m3fn
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Logical dtypes a quantized tensor can have, and dtypes that can be quantized."""

SCALE_LAYOUTS = ("compact", "expanded", "swizzled")
ATOM_ROWS, ATOM_COLUMNS = 128, 4
"""Rows and scale columns of one 512-byte atom of the swizzled layout; padded layouts are multiples of both.
"""

STATE_GROUP = 64
"""So many elements of a row of compact optimizer state share their scales."""

MXFP8_BLOCK = 32
"""Elements of an MXFP8 scaling block, along a row or a column."""

STRIP = (16, 128)
"""Rows and columns of a gradient that share the second-level scale of NVFP4 between hosts."""

MXFP8_DATA_DTYPE = torch.float8_e4m3fn
MXFP8_SCALE_DTYPE = torch.float8_e8m0fnu
MXFP8_SCALE_LAYOUTS = ("compact", "swizzled")


@dataclasses.dataclass(frozen=True)
class FourOverSix:
    """Options of four over six, which chooses the scale of each block by its error.

    A block's scale maps its largest magnitude to 6, or to 4, whichever gives the smaller error.

    e4m3_max: the scale of the block with the largest magnitude, 448 or 256. E4M3 ends at 448, so only 256
        leaves room for 1.5 times that scale.
    error: "mae", the sum of absolute errors, or "mse", the sum of squares.

    Examples:
        >>> quantized = zerofp4.quantize(x, four_over_six=zerofp4.FourOverSix())

    The choice needs a whole block: a cast raises ValueError for a shard with a part of one, and
    ZeroFP4Optimizer cuts between blocks. quantize_grouped does not have it: quantize each group by itself.

    Raises ValueError for any other value.
    """

    e4m3_max: int = 256
    error: str = "mae"

    def __post_init__(self) -> None:
        if self.e4m3_max not in (448, 256):
            raise ValueError(f"e4m3_max must be 448 or 256, got {self.e4m3_max!r}")
        if self.error not in ("mae", "mse"):
            raise ValueError(f"error must be 'mae' or 'mse', got {self.error!r}")
