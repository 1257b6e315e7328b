"""Outputs of another implementation of the same arithmetic (tests/data), by case and mode."""

from pathlib import Path

import numpy as np
import torch
from helpers import assert_bytes_equal

from zerofp4 import FourOverSix
from zerofp4.format import SCALE_DTYPE

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "nvfp4_reference.npz")
CASES = sorted({key.split("/")[0] for key in GOLDEN})
MODES = {
    "2d": {"block_rows": 16},
    "1d": {"block_rows": 1},
    "rht": {"block_rows": 1, "hadamard": True},
    "4over6_1d_e256_mae": {"block_rows": 1, "four_over_six": FourOverSix(256, "mae")},
    "4over6_1d_e448_mse": {"block_rows": 1, "four_over_six": FourOverSix(448, "mse")},
    "4over6_2d_e256_mae": {"block_rows": 16, "four_over_six": FourOverSix(256, "mae")},
    "4over6_2d_e448_mse": {"block_rows": 16, "four_over_six": FourOverSix(448, "mse")},
}
"""The options of quantize() behind each mode of the file."""


def cases_of(mode: str) -> list[str]:
    return [case for case in CASES if any(key.startswith(f"{case}/{mode}/") for key in GOLDEN)]


def golden(key: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[key].copy())


def golden_input(case: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[f"{case}/x_bf16"].view(np.int16).copy()).view(torch.bfloat16)


def check_golden(case: str, mode: str, fields: dict[str, torch.Tensor]) -> None:
    """Every field that the file has for this case and mode, byte for byte."""
    names = {key.split("/")[2] for key in GOLDEN if key.startswith(f"{case}/{mode}/")}
    assert names == names & fields.keys(), f"no check for {names - fields.keys()}"
    for name in names:
        value = fields[name].view(torch.uint8) if fields[name].dtype == SCALE_DTYPE else fields[name]
        assert_bytes_equal(value, golden(f"{case}/{mode}/{name}"), f"{case}/{mode}/{name}")
