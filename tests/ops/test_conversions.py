"""The conversions of the kernels against the specification: of chosen floats, on a GPU of all 2^32."""

import pytest
import torch
from helpers import assert_bytes_equal, needs_gpu, without_nan_payloads
from native import FORMATS, Conversions

from zerofp4 import reference

CHUNK = 1 << 26


def expected(x: torch.Tensor, format: str) -> torch.Tensor:
    if format == "e2m1":
        return reference.float_to_e2m1(x)
    if format == "e4m3":
        return reference.float_to_e4m3(x)
    return x.to(getattr(torch, format))


def canonical(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype.itemsize == 1 else without_nan_payloads(x)


def chosen_bits() -> torch.Tensor:
    """int32 [n]: every pattern of the upper 16 bits, with lower ones around the ties of every format."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper[:, None] + lower).flatten().to(torch.int32)


@pytest.fixture(scope="module")
def convert(device, tmp_path_factory) -> Conversions:
    return Conversions(device, tmp_path_factory.mktemp("native"))


def check(convert: Conversions, x: torch.Tensor, format: str) -> None:
    found = convert(x, format)
    same = canonical(found).view(torch.int16 if found.dtype.itemsize == 2 else torch.uint8)
    wanted = canonical(expected(x, format)).view(same.dtype)
    if not torch.equal(same, wanted):
        first = (same != wanted).nonzero()[0].item()
        assert_bytes_equal(
            same[first : first + 1], wanted[first : first + 1], f"{format} of {x[first].item()!r}"
        )


@pytest.mark.parametrize("format", FORMATS)
def test_conversions_of_chosen_floats(convert, device, format):
    check(convert, chosen_bits().view(torch.float32).to(device), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 1026])
@pytest.mark.parametrize("offset", [0, 1])
def test_conversions_of_any_length_and_alignment(convert, device, format, numel, offset):
    check(convert, torch.randn(numel + offset, device=device)[offset:], format)


@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize("format", FORMATS)
def test_conversions_of_all_floats(format, tmp_path):
    convert = Conversions(torch.device("cuda"), tmp_path)
    for first in range(-(1 << 31), 1 << 31, CHUNK):
        bits = torch.arange(first, first + CHUNK, dtype=torch.int32, device="cuda")
        check(convert, bits.view(torch.float32), format)
