"""Every operation on a GPU that is not the current one: the same bytes, and no memory of the current one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases.cast import check_kinds, make
from cases.every_operation import RUNS, matrix_of
from guards import Guards
from helpers import assert_bytes_equal, why_no_cuda
from tensor_helpers import FORMATS, assert_record_equal, values

import zerofp4
from zerofp4.optim import FusedAdamW

OTHER = torch.device("cuda", 1)
pytestmark = pytest.mark.skipif(
    why_no_cuda() is not None or torch.cuda.device_count() < 2, reason="needs two GPUs"
)


@pytest.fixture(autouse=True)
def nothing_happens_to_the_current_gpu():
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    yield
    torch.cuda.synchronize(OTHER)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before


def sleep() -> None:
    """What is queued on a stream of another GPU comes before what is written here, and is seen."""
    with torch.cuda.device(OTHER):
        torch.cuda._sleep(10**7)


def outputs(run, shape, device) -> list[tuple[str, torch.Tensor]]:
    guards = Guards(0xA5, 0)
    with guards.placing():
        return run(matrix_of(shape, torch.bfloat16, device), guards)


@pytest.mark.parametrize("shape", [(17, 30), (130, 144)], ids=str)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_operators_and_stages(run, shape):
    sleep()
    found, expected = (outputs(run, shape, device) for device in (OTHER, torch.device("cpu")))
    for (name, actual), (other, wanted) in zip(found, expected, strict=True):
        assert name == other and actual.device == OTHER
        assert_bytes_equal(actual.cpu(), wanted, name)


@pytest.mark.parametrize("format", FORMATS)
def test_tensors(format):
    x, options = values(48, 80, device=OTHER), {"columnwise": True, **FORMATS[format]}
    t = zerofp4.quantize(x, **options)
    sleep()
    t.copy_(x * 2)
    assert t.clone().device == t.dequantize().device == OTHER
    assert_record_equal(t.cpu(), zerofp4.quantize(x.cpu() * 2, **options))


def test_random_numbers_are_those_of_the_tensors_gpu():
    x, results = values(48, 80, device=OTHER), []
    for _ in range(2):
        generator = torch.Generator(OTHER).manual_seed(3)
        sleep()
        results.append(zerofp4.quantize(x, stochastic_rounding=True, generator=generator))
    assert_record_equal(*results)


def test_products_and_gradients():
    x, gradient = values(34, 80, device=OTHER), values(34, 48, device=OTHER, seed=2)
    weight = zerofp4.quantize(values(48, 80, device=OTHER, seed=1), columnwise=True)
    x.requires_grad_()
    sleep()
    y = torch.nn.functional.linear(x, weight)
    y.backward(gradient)
    assert y.device == x.grad.device == OTHER
    torch.testing.assert_close(y, x @ weight.dequantize().t())  # sums may be in another order, here and below
    a, b = (zerofp4.quantize(each, block=(1, 16)) for each in (x.detach(), weight.dequantize()))
    sleep()
    product, expected = zerofp4.gemm(a, b), zerofp4.gemm(a.cpu(), b.cpu())
    assert product.device == OTHER
    torch.testing.assert_close(product.cpu(), expected)


def test_a_step_of_an_optimizer_and_a_plan():
    weights, masters, starts = make(OTHER)
    plan = zerofp4.CastPlan(weights, masters, starts)
    optimizer = FusedAdamW(masters, lr=0.01)
    optimizer.offer_amaxes(plan)
    for _ in range(2):
        for master in masters:
            master.grad = torch.randn_like(master)
        sleep()
        optimizer.step()
        plan.step()
        plan.post()
    check_kinds(weights, masters)


def test_a_captured_step():
    weights, masters, starts = make(OTHER)
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    plan.post()
    with torch.cuda.device(OTHER):
        graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures belongs to the GPU of the process's first capture.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            plan.step()
            plan.post()
    for master in masters:
        master.mul_(-3)
    graph.replay()
    torch.cuda.synchronize(OTHER)
    check_kinds(weights, masters)


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


def test_no_context_is_made_on_a_gpu_that_is_not_used():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("torch itself made a context on GPU 0")
    assert done.returncode == 0, done.stderr
