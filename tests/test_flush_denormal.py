"""A processor told to flush denormals to zero changes no byte, with any number of threads."""

import pytest
import torch
from cases.fused import OPTIONS
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference
from zerofp4.format import SCALE_LAYOUTS

SHAPE = (1024, 512)  # worth two threads in every operation


@pytest.fixture(params=[1, 2])
def flushing(request):
    """flushing(f): what f() gives while the calling thread flushes denormals; its workers do not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)

    def call(function):
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        try:
            return function()
        finally:
            torch.set_flush_denormal(False)

    yield call
    torch.set_num_threads(threads)


def tiny(scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal and denormal values; `scale` is about their amax."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(SHAPE, generator=generator) * 2 - 1).mul_(scale).to(dtype)


SCALES = [1e-30, 1e-36, 1e-38, 1e-40]


def check(actual, expected, names) -> None:
    for name in names:
        assert_bytes_equal(getattr(actual, name), getattr(expected, name), name)


NVFP4 = ("rowwise_data", "columnwise_data", "rowwise_scale", "columnwise_scale", "amax")
MXFP8 = NVFP4[:-1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
def test_quantize(flushing, scale, block):
    x = tiny(scale)
    expected = zerofp4.quantize(x, block=block, columnwise=True)
    check(flushing(lambda: zerofp4.quantize(x, block=block, columnwise=True)), expected, NVFP4)


def test_quantize_is_that_of_the_specification(flushing):
    x = tiny(1e-38)
    expected = reference.quantize(x)
    check(flushing(lambda: zerofp4.quantize(x, columnwise=True)), expected, NVFP4)


@pytest.mark.parametrize("scale", SCALES)
def test_dequantize(flushing, scale):
    t = zerofp4.quantize(tiny(scale), columnwise=True)
    expected = t.dequantize(torch.float32)
    assert_bytes_equal(flushing(lambda: t.dequantize(torch.float32)), expected, "values")


@pytest.mark.parametrize("scale", SCALES)
def test_mxfp8(flushing, scale):
    x = tiny(scale)
    expected = zerofp4.quantize_mxfp8(x, columnwise=True)
    check(flushing(lambda: zerofp4.quantize_mxfp8(x, columnwise=True)), expected, MXFP8)
    values = expected.dequantize(torch.float32)
    assert_bytes_equal(flushing(lambda: expected.dequantize(torch.float32)), values, "values")


@pytest.mark.parametrize("scale", SCALES)
def test_cast(flushing, scale):
    master = tiny(scale)

    def cast():
        weight = zerofp4.empty(SHAPE, dtype=torch.float32, scale_layouts=SCALE_LAYOUTS)
        zerofp4.cast_master_weights_to_nvfp4([weight], [master.flatten()], [0])
        zerofp4.post_all_gather_processing([weight])
        return weight

    check(flushing(cast), cast(), NVFP4)


def test_update(flushing):
    master, gradient = tiny(1e-30), tiny(1e-18)

    def update():
        p = master.flatten().clone().requires_grad_()
        p.grad = gradient.flatten().clone()
        optimizer = zerofp4.optim.FusedAdamW([p], **OPTIONS | {"eps": 1e-40})
        optimizer.step()
        return p.detach(), optimizer.state[p]["exp_avg_sq"]

    expected = update()
    for actual, wanted in zip(flushing(update), expected, strict=True):
        assert_bytes_equal(actual, wanted, "master or moment")
