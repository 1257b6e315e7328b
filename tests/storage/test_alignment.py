"""Addresses that a GPU cannot load elements from are refused before a kernel fails on them, which would end
the process's use of that GPU.
"""

import pytest
import torch
from helpers import assert_bytes_equal, at_an_odd_address, needs_gpu

import zerofp4
from zerofp4.optim import FusedAdamW
from zerofp4.storage import check_memory

MESSAGE = r"is at address 0x[0-9a-f]+ of a GPU, which is no multiple of the"


def odd(shape, dtype=torch.float32) -> torch.Tensor:
    return at_an_odd_address(torch.ones(shape, dtype=dtype, device="cuda"))


CALLS = {
    "quantize": lambda: zerofp4.quantize(odd((16, 32), torch.bfloat16)),
    "straight through": lambda: zerofp4.quantize(odd((16, 32)), straight_through=True),
    "a given amax": lambda: zerofp4.quantize(torch.ones(16, 32, device="cuda"), amax=odd(1)),
    "quantize_dequantize": lambda: zerofp4.quantize_dequantize(odd((16, 32))),
    "quantize_mxfp8": lambda: zerofp4.quantize_mxfp8(odd((32, 32), torch.float16)),
    "quantize_grouped": lambda: zerofp4.quantize_grouped(odd((16, 32), torch.bfloat16), [16]),
    "splits": lambda: zerofp4.quantize_grouped(torch.ones(16, 32, device="cuda"), odd(1, torch.int32)),
    "copy_": lambda: zerofp4.empty((16, 32), device="cuda").copy_(odd((16, 32))),
    "a master": lambda: zerofp4.CastPlan([zerofp4.empty((16, 32), device="cuda")], [odd(512)], [0]),
    "a bf16 master": lambda: zerofp4.cast_master_weights_to_nvfp4(
        [zerofp4.empty((16, 32), device="cuda")], [odd(512, torch.bfloat16)], [0]
    ),
    "found_inf": lambda: zerofp4.CastPlan(
        [zerofp4.empty((16, 32), device="cuda")], [torch.ones(512, device="cuda")], [0], found_inf=odd(1)
    ),
    "a parameter": lambda: FusedAdamW([odd(512)]),
}


@needs_gpu
@pytest.mark.parametrize("name", CALLS)
def test_what_a_gpu_cannot_load_is_refused(name):
    with pytest.raises(ValueError, match=MESSAGE):
        CALLS[name]()
    torch.cuda.synchronize()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_a_gpu_cannot_load(dtype):
    p = torch.ones(300, device="cuda")
    optimizer = FusedAdamW([p, torch.ones(3, device="cuda")])
    p.grad_dtype = dtype
    p.grad = odd(300, dtype)
    with pytest.raises(ValueError, match="the gradient of .* " + MESSAGE):
        optimizer.step()
    assert p.eq(1).all() and not optimizer.state
    p.grad = torch.ones(301, dtype=dtype, device="cuda")[1:]  # at an element's multiple, but no vector's
    optimizer.step()
    assert p.ne(1).all()
    p.grad = odd(300, dtype)
    with pytest.raises(ValueError, match="the gradient of .* " + MESSAGE):
        optimizer.step()


@needs_gpu
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_shard_buffer_of_bytes_lies_anywhere(offset):
    weight, master = zerofp4.empty((16, 32), device="cuda"), torch.randn(512, device="cuda")
    codes = torch.zeros(256 + offset, dtype=torch.uint8, device="cuda")[offset:]
    plan = zerofp4.CastPlan([weight], [master], [0], fsdp_shard_model_weights=[codes])
    plan.step()
    expected = zerofp4.quantize(master.view(16, 32).bfloat16(), block=(16, 16)).rowwise_data
    assert_bytes_equal(codes, expected.view(-1), "codes")


def test_a_cpu_loads_from_any_address():
    check_memory("x", at_an_odd_address(torch.ones(16, 32)))
