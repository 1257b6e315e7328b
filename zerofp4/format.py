"""The constants of NVFP4: element and scale formats, block sizes, the names of scale layouts."""

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
