"""A call of code by torch.compile runs no Python of this package: operators are dispatched in C++, and so are
the questions that guards ask a weight. Guards of an older torch ask some through __torch_function__.
"""

from collections import Counter

import pytest
import torch
from cases.frames import TORCH, frames
from helpers import assert_bytes_equal, poisoned_allocations
from tensor_helpers import DTYPES, values
from torch import nn

import zerofp4
from zerofp4.ops.dequantize import _dequantize

FORMATS = {
    "16x16": {},
    "1x16": {"block": (1, 16)},
    "rows only": {"columnwise": False},
    "four over six": {"four_over_six": zerofp4.FourOverSix()},
}


@pytest.mark.heavy
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_no_frame_of_this_package(fresh_compiler, backend, format):
    """On the CPU, where the backward pass runs in the thread that asks for it."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64)).bfloat16()
    zerofp4.convert_model(model, lambda module, name: isinstance(module, nn.Linear), **FORMATS[format])
    run, x, losses = torch.compile(model, fullgraph=True, backend=backend), values(32, 64), []
    for _ in range(3):
        forward = frames(lambda: losses.append(run(x).sum()))
        backward = frames(lambda: losses.pop().backward())
    if TORCH < (2, 12):
        assert set(forward) <= {"quantized_tensor.py: __torch_function__"}
        forward.clear()
    assert (forward, backward) == (Counter(), Counter())


def test_frames_are_counted():
    """Or the test above finds none whatever runs."""
    assert frames(lambda: zerofp4.quantize(values(32, 64)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_the_operator_gives_the_bytes_of_python(device, block_rows, columnwise, dtype):
    t = zerofp4.quantize(values(48, 80, device=device), block=(block_rows, 16), columnwise=True)
    data, scale = (t.columnwise_data, t.columnwise_scale) if columnwise else (t.rowwise_data, t.rowwise_scale)
    for given in (scale, scale.view(torch.uint8)):
        arguments = (data, given, t.amax, block_rows, dtype, "compact", 448, columnwise)
        with poisoned_allocations():
            actual, expected = torch.ops.zerofp4.dequantize(*arguments), _dequantize(*arguments)
        assert_bytes_equal(actual, expected, "values")


def plain_arguments() -> dict:
    t = zerofp4.quantize(values(48, 80))
    return {
        "data": t.rowwise_data,
        "scale": t.rowwise_scale,
        "amax": t.amax,
        "block_rows": 16,
        "dtype": torch.bfloat16,
        "layout": "compact",
        "e4m3_max": 448,
        "columnwise": False,
    }


@pytest.mark.parametrize("name", ["data", "scale", "amax"])
def test_memory_that_is_gone_is_refused(name):
    arguments = plain_arguments()
    arguments[name] = arguments[name].clone()
    arguments[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"{name} needs .* of its storage, which has 0: it was freed"):
        torch.ops.zerofp4.dequantize(*arguments.values())


def test_a_stack_goes_on_to_python(device):
    t = zerofp4.quantize(values(3, 48, 80, device=device))
    arguments = (t.rowwise_data, t.rowwise_scale, t.amax, 16, torch.bfloat16)
    assert_bytes_equal(torch.ops.zerofp4.dequantize(*arguments), t.dequantize(), "values")
