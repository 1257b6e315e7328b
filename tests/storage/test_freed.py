"""Storage that was freed in place, as FSDP frees what it has gathered: a kernel would read address 0."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases.mxfp8 import FORMATS
from helpers import assert_bytes_equal, freed
from tensor_helpers import make, values

import zerofp4
from zerofp4.gemm import Operand

READS = {
    "dequantize": (lambda t, _: t.dequantize(), "rowwise", "the tensor 'fc1'"),
    "to": (lambda t, _: t.to(torch.float64), "rowwise", "the tensor 'fc1'"),
    "linear": (
        lambda t, _: torch.nn.functional.linear(torch.ones(2, t.shape[1], dtype=t.dtype, device=t.device), t),
        "rowwise",
        "the tensor 'fc1'",
    ),
    "dequantize_many": (
        lambda t, other: zerofp4.dequantize_many([other, t]),
        "rowwise",
        r"tensors\[1\] 'fc1'",
    ),
    "gemm, a": (lambda t, other: zerofp4.gemm(t, other), "rowwise", "a 'fc1'"),
    "gemm, b": (lambda t, other: zerofp4.gemm(other, t), "rowwise", "b 'fc1'"),
    "gemm of columns": (
        lambda t, other: zerofp4.gemm(Operand(t, columnwise=True), Operand(other, columnwise=True)),
        "columnwise",
        "a 'fc1'",
    ),
    "clone": (lambda t, _: t.clone(), "", "the tensor 'fc1'"),
    "deepcopy": (lambda t, _: copy.deepcopy(t), "", "the tensor 'fc1'"),
    "move": (lambda t, _: t.to("cpu", copy=True), "", "the tensor 'fc1'"),
    "pickle": (lambda t, _: pickle.dumps(t), "", "the tensor 'fc1'"),
    "source of copy_": (lambda t, other: other.copy_(t), "", "the source of copy_ 'fc1'"),
}
"""What is called, which side of the tensor it reads, and what messages call the tensor."""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("read", READS)
def test_a_read_names_the_tensor_and_the_buffer(device, format, read):
    call, side, named = READS[read]
    options = {"scale_layouts": ["compact"]}
    for name, _ in FORMATS[format](device, **options).record.buffers():
        if not (name == "amax" or name.startswith(side)):
            continue
        t, other = (FORMATS[format](device, **options) for _ in range(2))
        t.record.name = "fc1"
        buffer = t.record.buffer(name)
        call(t, other)
        freed(buffer)
        with pytest.raises(RuntimeError, match=f"{named}: {name} needs .* which has 0: it was freed"):
            call(t, other)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_read_may_be_gone(device, format):
    t = FORMATS[format](device, scale_layouts=["compact"])
    expected = t.dequantize()
    for name in ("columnwise_data", "columnwise_scale"):
        freed(t.record.buffer(name))
    assert_bytes_equal(t.dequantize(), expected, "values")


@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_were_freed_are_not_swizzled(device, format):
    t = FORMATS[format](device, scale_layouts=["compact"])
    freed(t.rowwise_scale)
    freed(t.columnwise_scale)
    for columnwise, side in enumerate(("rowwise", "columnwise")):
        with pytest.raises(RuntimeError, match=f"{side}_scale needs .* which has 0"):
            t.swizzled_scale(columnwise=bool(columnwise))


def test_freed_scales_of_a_list_are_not_swizzled(device):
    tensors = [make(device, scale_layouts=["compact"]) for _ in range(3)]
    freed(tensors[1].rowwise_scale)
    with pytest.raises(RuntimeError, match=r"scales\[1\] needs 15 bytes of its storage, which has 0"):
        zerofp4.swizzle_scales(tensors)


def test_what_is_handed_over():
    x, t = values(48, 80), make("cpu")
    for _, buffer in t.record.buffers():
        freed(buffer)
    for act in (t.zero_, lambda: t.copy_(x), lambda: t.fill_(1)):
        with pytest.raises(RuntimeError, match="which has 0: it was freed or shrunk in place"):
            act()
    with pytest.raises(RuntimeError, match="out: rowwise_data needs 1920 bytes of its storage, which has 0"):
        zerofp4.quantize(x, out=t)
    with pytest.raises(RuntimeError, match="rowwise_data needs 1920 bytes of its storage"):
        zerofp4.CastPlan([t], [x.float().view(-1)], [0])
    with pytest.raises(RuntimeError, match="rowwise_data needs 1920 bytes of its storage"):
        make("cpu").rowwise_data = t.record.rowwise.data
    freed(x)
    for quantize in (zerofp4.quantize, zerofp4.quantize_mxfp8, zerofp4.quantize_dequantize):
        with pytest.raises(RuntimeError, match="x needs 7680 bytes of its storage, which has 0"):
            quantize(x)
    with pytest.raises(RuntimeError, match=r"master_weights\[0\] needs 15360 bytes"):
        zerofp4.CastPlan([zerofp4.empty((48, 80))], [freed(torch.ones(48 * 80))], [0])
