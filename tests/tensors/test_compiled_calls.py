"""A call of code by torch.compile runs no Python of this package: operators are dispatched in C++, and so are
the questions that guards ask a weight. Guards of an older torch ask some through __torch_function__.
"""

from collections import Counter

import pytest
import torch
from cases.frames import TORCH, frames
from tensor_helpers import values
from torch import nn

import zerofp4

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
