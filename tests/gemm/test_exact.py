"""The exact backend: bfloat16 holds what it multiplies."""

import pytest
import torch
from gemm_cases import nvfp4, operand, specified
from helpers import assert_bytes_equal
from tensor_helpers import values

import zerofp4
from zerofp4 import Operand, reference
from zerofp4.format import SCALE_DTYPE
from zerofp4.gemm import exact

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_every_code_times_every_scale_is_exact(device, dtype, e4m3_max):
    """16 codes, and the 127 scales that quantization can store: not negative, not NaN."""
    scales = torch.arange(127, dtype=torch.uint8).view(SCALE_DTYPE).reshape(-1, 1)
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scales), 16)
    t = zerofp4.empty((len(scales), 16), device=device, columnwise=False)
    record = zerofp4.quantize(
        t.dequantize(), block=(1, 16), four_over_six=zerofp4.FourOverSix(e4m3_max)
    ).record
    record.rowwise.data.copy_(reference.pack(codes.contiguous()))
    record.rowwise.scales["compact"].view(torch.uint8).copy_(scales.view(torch.uint8))
    record.rowwise.amax.fill_(1e9)  # no part of them
    expected = reference.e2m1_to_float(codes).double() * scales.double()
    actual = exact.values(Operand(record), dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual.cpu().double(), expected)
    assert_bytes_equal(actual.cpu().float(), expected.float(), "signs of zeros too")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("options", [{}, {"block": (1, 16)}], ids=["2d", "1d"])
def test_values_are_in_the_orientation_of_the_product(device, options, side, dtype):
    a = operand(34, 50, side, nvfp4(**options), device=device)
    assert torch.equal(exact.values(a, dtype).cpu().double(), specified(a))


def test_the_last_group_of_a_transform_is_there(device):
    a = operand(32, 17, "columnwise", nvfp4(block=(1, 16), hadamard=True), device=device)
    assert exact.values(a).shape == (32, 32) and a.shape == (32, 17)


def test_mxfp8_values_are_those_of_bfloat16(device):
    """Below 2^-126 bfloat16 has fewer bits than E4M3: every device rounds there in the same way."""
    x = values(32, 64, device=device, dtype=torch.float32)
    x *= torch.logspace(-41, 30, 32, device=device).unsqueeze(1)
    a = Operand(zerofp4.quantize_mxfp8(x))
    assert torch.equal(exact.values(a, torch.float32), exact.values(a).float())
    normal = x.abs().amin(1) > 2.0**-100
    whole = zerofp4.quantize_mxfp8(x).dequantize(torch.float32)
    assert torch.equal(exact.values(a, torch.float32)[normal], whole[normal])


def test_the_neutral_amax_is_made_once(device):
    assert exact.neutral_amax(device) is exact.neutral_amax(device)
    assert exact.neutral_amax(device).item() == 2688
