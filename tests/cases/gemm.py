"""What tests of products share: operands with what the specification says that they hold."""

import pytest
import torch
from tensor_helpers import values

import zerofp4
from zerofp4 import Operand
from zerofp4.gemm import grouped

SIDES = ("rowwise", "columnwise")

# (M, N, K): one element of everything, cut blocks, odd M and N, several atoms of swizzled scales.
SHAPES = [(2, 2, 2), (1, 3, 16), (17, 31, 50), (33, 47, 98), (130, 66, 288), (64, 16, 96)]

# Options of quantize that both sides of a product can have.
NVFP4 = {
    "1d": {"block": (1, 16)},
    "2d": {},
    "four over six": {"block": (1, 16), "four_over_six": zerofp4.FourOverSix()},
    "four over six, 448": {"four_over_six": zerofp4.FourOverSix(448, "mse")},
}
TRANSFORMS = {"signs": {}, "no signs": {"random_signs": False}}


def operand(rows: int, contraction: int, side: str, make, **how) -> Operand:
    """A random operand of that size: `side` of what `make`, a function like quantize, makes of values."""
    shape = (rows, contraction) if side == "rowwise" else (contraction, rows)
    x = values(*shape, **how)
    copies = {"rowwise": side == "rowwise", "columnwise": side == "columnwise"}
    return Operand(make(x, **copies), columnwise=side == "columnwise")


def nvfp4(**options):
    return lambda x, **copies: zerofp4.quantize(x, **copies, **options)


def skip_without_grouped_mm(device: torch.device) -> None:
    if grouped.grouped_mm is None:
        pytest.skip(f"torch {torch.__version__} has no grouped_mm")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in grouped.CAPABILITIES:
        pytest.skip("grouped_mm is not one kernel on this GPU")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Frobenius norms."""
    difference = (actual.cpu().double() - expected).norm()
    return float(difference / expected.norm()) if expected.norm() else float(difference)
