"""Operations on a GPU that is not the current one: nothing is made on the others."""

import subprocess
import sys

import pytest
import torch
from helpers import assert_bytes_equal, needs_gpu

import zerofp4

SCRIPT = """
import ctypes, sys, threading
import torch
import zerofp4

driver = ctypes.CDLL("libcuda.so.1")

def is_in_use(device):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)

x = torch.randn(64, 64, device="cuda:1")
expected = zerofp4.quantize(x.cpu())
out = zerofp4.empty((64, 64), dtype=torch.float32, device="cuda:1", columnwise=False)
torch.cuda.synchronize(1)
if is_in_use(0):
    sys.exit(77)

def run():
    zerofp4.quantize(x, out=out)  # nothing of torch's comes before the kernels of this thread
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0, torch.cuda.current_device()

run()
out.record.zero()
failed = []
threading.excepthook = failed.append
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert not failed, failed
assert torch.equal(out.rowwise_data.cpu(), expected.rowwise_data)
assert is_in_use(1) and not is_in_use(0), "a context was made on GPU 0"
y = torch.randn(64, 64, device="cuda:0")  # and GPU 0 is as good as ever
assert torch.equal(zerofp4.quantize(y).rowwise_data.cpu(), zerofp4.quantize(y.cpu()).rowwise_data)
"""


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_no_context_is_made_on_a_gpu_that_is_not_used():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("torch itself made a context on GPU 0")
    assert done.returncode == 0, done.stderr


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_gpu_stays_current():
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            x = torch.randn(34, 48, device=f"cuda:{other}")
            before = torch.zeros(1, device="cuda")
            values = zerofp4.quantize_dequantize(x)
            assert torch.cuda.current_device() == current == torch.zeros(1, device="cuda").device.index
            assert (before.device.index, values.device.index) == (current, other)
            assert_bytes_equal(values.cpu(), zerofp4.quantize_dequantize(x.cpu()), "values")
