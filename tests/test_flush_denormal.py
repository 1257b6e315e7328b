"""A processor told to flush denormals to zero changes no byte, with any number of threads."""

import pytest
import torch
from helpers import assert_all_equal, assert_bytes_equal

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


def cast(master):
    weight = zerofp4.empty(SHAPE, dtype=torch.float32, scale_layouts=SCALE_LAYOUTS)
    zerofp4.cast_master_weights_to_nvfp4([weight], [master.flatten()], [0])
    zerofp4.post_all_gather_processing([weight])
    return buffers(weight)


def buffers(tensor) -> dict[str, torch.Tensor]:
    return dict(tensor.record.buffers())


OPERATIONS = {
    "16x16": lambda x: buffers(zerofp4.quantize(x, columnwise=True)),
    "1x16": lambda x: buffers(zerofp4.quantize(x, block=(1, 16), columnwise=True)),
    "mxfp8": lambda x: buffers(zerofp4.quantize_mxfp8(x, columnwise=True)),
    "cast": cast,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("scale", [1e-30, 1e-36, 1e-38, 1e-40])
def test_operations(flushing, scale, name):
    x = tiny(scale)
    expected = OPERATIONS[name](x)
    for key, buffer in flushing(lambda: OPERATIONS[name](x)).items():
        assert_bytes_equal(buffer, expected[key], key)
    if name == "16x16":
        specified = reference.quantize(x)
        for key in ("rowwise_data", "columnwise_data", "rowwise_scale", "columnwise_scale", "amax"):
            assert_bytes_equal(expected[key], getattr(specified, key), key)
    if name != "cast":
        make = zerofp4.quantize_mxfp8 if name == "mxfp8" else zerofp4.quantize
        quantized = make(x)
        values = quantized.dequantize(torch.float32)
        assert_bytes_equal(flushing(lambda: quantized.dequantize(torch.float32)), values, "values")


def test_update(flushing):
    master, gradient = tiny(1e-30), tiny(1e-18)

    def update():
        p = master.flatten().clone().requires_grad_()
        p.grad = gradient.flatten().clone()
        optimizer = zerofp4.optim.FusedAdamW([p], lr=0.01, eps=1e-40, weight_decay=0.1)
        optimizer.step()
        return p.detach(), optimizer.state[p]["exp_avg_sq"]

    expected = update()
    assert_all_equal(flushing(update), expected, "master or moment")
