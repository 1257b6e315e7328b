"""The exact backend: bfloat16 holds what it multiplies."""

import pytest
import torch
from cases.gemm import nvfp4, operand
from helpers import assert_bytes_equal
from tensor_helpers import values

import zerofp4
from zerofp4 import FourOverSix, Operand, reference
from zerofp4.blackwell_check import alpha
from zerofp4.format import SCALE_DTYPE
from zerofp4.gemm import exact, native

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def values_of(a: Operand, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    left, right, _ = exact.factors(a, a, dtype)
    assert_bytes_equal(left, right, "both operands")
    return left


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
    actual = values_of(Operand(record), dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual.cpu().double(), expected)
    assert_bytes_equal(actual.cpu().float(), expected.float(), "signs of zeros too")


def test_mxfp8_values_are_those_of_bfloat16(device):
    """Below 2^-126 bfloat16 has fewer bits than E4M3: every device rounds there in the same way."""
    x = values(32, 64, device=device, dtype=torch.float32)
    x *= torch.logspace(-41, 30, 32, device=device).unsqueeze(1)
    a = Operand(zerofp4.quantize_mxfp8(x))
    assert torch.equal(values_of(a, torch.float32), values_of(a).float())
    normal = x.abs().amin(1) > 2.0**-100
    whole = zerofp4.quantize_mxfp8(x).dequantize(torch.float32)
    assert torch.equal(values_of(a, torch.float32)[normal], whole[normal])


@pytest.mark.parametrize("maxima", [(448, 448), (448, 256), (256, 448), (256, 256)], ids=str)
def test_alpha_comes_with_the_values(device, maxima):
    options = [{} if each == 448 else {"four_over_six": FourOverSix(each)} for each in maxima]
    a, b = (
        operand(32, 64, "rowwise", nvfp4(**each), device=device, seed=seed)
        for seed, each in enumerate(options)
    )
    a.copy.amax.mul_(3e-7)
    b.copy.amax.mul_(7e5)
    *_, found = exact.factors(a, b, torch.bfloat16)
    assert_bytes_equal(found.cpu(), alpha(a, b), "alpha")
    *_, found, _ = native.factors(a, b)
    assert_bytes_equal(found.cpu(), alpha(a, b), "of the native backend")


@pytest.mark.parametrize("make", [zerofp4.quantize, zerofp4.quantize_mxfp8])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_the_dtype_of_factors(device, out_dtype, make):
    """A product of bfloat16 cannot be rounded to float16, so one of float16 is taken where that is exact."""
    a = Operand(make(values(32, 64, device=device)))
    halves = out_dtype == torch.float16 and a.is_nvfp4
    on_cuda = torch.float16 if halves else torch.bfloat16
    assert exact.factor_dtype(a, out_dtype) == (torch.float32 if device.type == "cpu" else on_cuda)
