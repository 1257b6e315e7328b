"""The native backend, as far as a machine without FP4 tensor cores can show it: torch's scaled_mm checks
sizes, dtypes, strides and counts of scales on meta tensors too.
"""

import pytest
import torch
from cases.gemm import SIDES, nvfp4, operand
from helpers import assert_bytes_equal
from tensor_helpers import values

import zerofp4
from zerofp4 import Operand, gemm, reference
from zerofp4.gemm import chosen_backend, native
from zerofp4.layout import round_up

# (T, K, N): tokens, in_features, out_features of layers, with sizes that are no multiples of anything.
LAYERS = [(128, 256, 512), (1, 64, 32), (17, 50, 34), (100, 2, 66), (130, 288, 1030), (40, 96, 2)]


def meta(tensor):
    """Without data, of the same record."""
    return type(tensor)(tensor.record.map(lambda buffer: buffer.to("meta")))


def linear_products(make_x, make_w, t, k, n):
    """The operands of the three products of a layer, on meta."""
    qx, qg = meta(make_x(values(t, k))), meta(make_x(values(t, n)))
    qw = meta(make_w(values(n, k)))
    yield (t, n), qx, qw
    yield (t, k), qg, Operand(qw, columnwise=True)
    yield (n, k), Operand(qg, columnwise=True), Operand(qx, columnwise=True)


FORMATS = {
    "nvfp4": (nvfp4(block=(1, 16), columnwise=True, hadamard=True), nvfp4(columnwise=True)),
    "nvfp4, swizzled": (
        nvfp4(block=(1, 16), columnwise=True, hadamard=True, scale_layouts=["swizzled"]),
        nvfp4(columnwise=True, scale_layouts=["swizzled"]),
    ),
    "nvfp4, weights 1x16": (
        nvfp4(block=(1, 16), columnwise=True, hadamard=True),
        nvfp4(block=(1, 16), columnwise=True),
    ),
    "mxfp8": (lambda x: zerofp4.quantize_mxfp8(x, columnwise=True),) * 2,
}


@pytest.mark.parametrize("makers", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_torch_accepts_the_operands_of_every_layer(layer, makers):
    for shape, a, b in linear_products(*makers, *layer):
        for out_dtype in (torch.bfloat16, torch.float32):
            out = gemm(a, b, out_dtype=out_dtype, backend="native")
            assert (tuple(out.shape), out.dtype, out.device.type) == (shape, out_dtype, "meta")
            assert out.is_contiguous()
        bias = torch.zeros(shape[1], device="meta")
        assert gemm(a, b, bias=bias, backend="native").shape == shape
        target = torch.zeros(shape, device="meta")
        assert gemm(a, b, accumulate_into=target, backend="native") is target


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("contraction", [2, 34, 50, 96])
def test_what_is_behind_the_elements_is_zero(contraction, side):
    """Padded codes are those of zero, and the scales of blocks behind the contraction are zero."""
    a = operand(18, contraction, side, nvfp4(block=(1, 16)))
    rows, padded = 32, round_up(contraction, 32)
    data = native.codes(a, rows, padded).view(torch.uint8)
    assert data.shape == (rows, padded // 2)
    unpacked = reference.unpack(data)
    assert_bytes_equal(unpacked[:18, :contraction], reference.unpack(a.copy.data), "codes")
    assert not unpacked[18:].any() and not unpacked[:, contraction:].any()
    scale = reference.unswizzle_scale(zerofp4.ops.padded_scale(a.record, side, "swizzled"))
    assert (
        scale.shape[1] >= padded // 16
        and not scale.view(torch.uint8)[:, round_up(contraction, 16) // 16 :].any()
    )
    assert not scale.view(torch.uint8)[18:].any()


def test_mxfp8_columns_are_transposed():
    a = operand(18, 50, "columnwise", zerofp4.quantize_mxfp8)
    data = native.codes(a, 32, 64)
    assert data.shape == (32, 64) and data.is_contiguous()
    assert_bytes_equal(
        data[:18, :50].contiguous(), a.copy.data.view(torch.uint8).t().contiguous().view(data.dtype), ""
    )


def test_auto_is_exact_without_the_hardware():
    assert chosen_backend(torch.device("cpu")) == "exact"
    assert chosen_backend(torch.device("meta")) == "exact"


def test_forcing_what_the_hardware_lacks_raises(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0):
        pytest.skip("this GPU has FP4 tensor cores")
    a = zerofp4.quantize(values(32, 64, device=device))
    with pytest.raises(
        RuntimeError, match=r"backend 'native' cannot run: it needs FP4 tensor cores .* on (cpu|cuda)"
    ):
        gemm(a, a, backend="native")


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), "exact"), ((10, 0), "native"), ((12, 0), "native")]
)
def test_the_choice_is_by_capability_and_visible(monkeypatch, capability, backend):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert chosen_backend(torch.device("cuda", 0)) == backend
    assert zerofp4.build_info()["cuda"]["devices"][0]["gemm"] == backend
