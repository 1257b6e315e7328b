"""The native backend, as far as a machine without FP4 tensor cores can show it: on meta tensors, of which
torch's scaled_mm checks sizes, dtypes, strides and counts of scales, and with a cuBLASLt of the tests' own.
"""

import pytest
import torch
from cases.fp4_cores import PRODUCT, fp4_cores
from cases.gemm import SIDES, nvfp4, operand
from helpers import assert_bytes_equal
from tensor_helpers import values

import zerofp4
from zerofp4 import Operand, gemm, nn, ops, reference
from zerofp4.gemm import chosen_backend, native
from zerofp4.gemm.operand import as_operand
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
    for (m, n), a, b in linear_products(*makers, *layer):
        left, right, alpha, scales = native.factors(*map(as_operand, "ab", (a, b)))
        for out_dtype in (torch.bfloat16, torch.float32):
            out = ops.product._scaled_mm(left, right, alpha, out_dtype, scales)
            assert (tuple(out.shape), out.dtype) == ((m, right.shape[0]), out_dtype)
            out = gemm(a, b, out_dtype=out_dtype, backend="native")
            assert (tuple(out.shape), out.dtype, out.device.type) == ((m, n), out_dtype, "meta")
            assert out.is_contiguous()
        assert gemm(a, b, bias=torch.zeros(n, device="meta"), backend="native").shape == (m, n)
        target = torch.zeros(m, n, device="meta")
        assert gemm(a, b, accumulate_into=target, backend="native") is target


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("contraction", [2, 34, 50, 96])
def test_what_is_behind_the_elements_is_zero(contraction, side):
    """Padded codes are those of zero, and the scales of blocks behind the contraction are zero."""
    a = operand(18, contraction, side, nvfp4(block=(1, 16)))
    rows, padded = 32, round_up(contraction, 32)
    data = native.codes(a, rows, padded)
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


# With the test's own cuBLASLt


@pytest.fixture
def cublaslt():
    with fp4_cores() as library:
        yield library


@pytest.mark.parametrize("makers", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("layer", [(128, 256, 512), (17, 50, 34), (130, 288, 1030)], ids=str)
def test_products_are_the_exact_ones(cublaslt, layer, makers):
    t, k, n = layer
    x, g, w = makers[0](values(t, k)), makers[0](values(t, n)), makers[1](values(n, k))
    pairs = [
        (x, w),
        (g, Operand(w, columnwise=True)),
        (Operand(g, columnwise=True), Operand(x, columnwise=True)),
    ]
    for a, b in pairs:
        exact = gemm(a, b, out_dtype=torch.float32, backend="exact")
        bias, into = values(exact.shape[1]), torch.full_like(exact, 3.0)
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = gemm(a, b, out_dtype=out_dtype, backend="native")
            assert_close(found, exact.to(out_dtype))
            for each in (bias, bias.to(out_dtype)):
                found = gemm(a, b, out_dtype=out_dtype, bias=each, backend="native")
                assert_close(found, (exact + each).to(out_dtype))
        assert gemm(a, b, accumulate_into=into, backend="native") is into
        assert_close(into, exact + 3)
        gemm(a, b, accumulate_into=into, bias=bias, backend="native")
        assert_close(into, 2 * exact + bias + 3)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums in another order, and their rounding."""
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2 * torch.finfo(actual.dtype).eps
    assert actual.dtype == expected.dtype and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_bias_and_rounding_are_part_of_the_product(cublaslt):
    a, b = quantized_pair()
    for dtype in (torch.bfloat16, torch.float16):
        gemm(a, b, out_dtype=dtype, bias=values(48).to(dtype), backend="native")
        assert asked_for(cublaslt) == [(dtype, True, False)]
    gemm(a, b, out_dtype=torch.float32, backend="native")
    gemm(a, b, accumulate_into=torch.zeros(32, 48), backend="native")
    assert asked_for(cublaslt) == [(torch.float32, False, False), (torch.float32, False, True)]
    # With a float32 output it would add a bfloat16 bias.
    gemm(a, b, out_dtype=torch.float32, bias=values(48), backend="native")
    assert asked_for(cublaslt) == []
    assert [p.has_bias for p in cublaslt.ran] == [True, True, False, False, False]


def quantized_pair():
    return zerofp4.quantize(values(32, 64), block=(1, 16)), zerofp4.quantize(values(48, 64, seed=1))


def asked_for(cublaslt):
    """Output, bias and accumulation of what was asked for since the last call."""
    found = [(p.output, p.has_bias, p.accumulate) for p in cublaslt.asked]
    cublaslt.asked.clear()
    return found


def test_what_is_refused_is_asked_for_without_the_bias(cublaslt):
    """As cuBLASLt does with NVFP4 and a bias on some GPUs: then a pass over the float32 product is left."""
    cublaslt.takes = lambda problem: not problem.has_bias
    a, b = quantized_pair()
    bias = values(48).bfloat16()
    expected = (gemm(a, b, out_dtype=torch.float32, backend="exact") + bias).bfloat16()
    for asked in ([(torch.bfloat16, True, False), (torch.float32, False, False)], []):
        assert_close(gemm(a, b, out_dtype=torch.bfloat16, bias=bias, backend="native"), expected)
        assert asked_for(cublaslt) == asked


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_without_an_algorithm_torch_multiplies_and_then_the_exact_backend(cublaslt, monkeypatch, backend):
    chosen = {"auto": "native", "native": "native", "exact": "exact"}
    monkeypatch.setattr(PRODUCT, "chosen_backend", lambda device, backend: chosen[backend])
    cublaslt.takes = lambda problem: False
    calls = []

    def scaled_mm(a, b, alpha, out_dtype, scales):
        calls.append(out_dtype)
        if len(calls) == 1:
            return torch.ones(a.shape[0], b.shape[0], dtype=out_dtype)
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")

    monkeypatch.setattr(ops.product, "_scaled_mm", scaled_mm)
    a, b = quantized_pair()
    bias = values(48)
    found = gemm(a, b, out_dtype=torch.bfloat16, bias=bias, backend=backend)
    assert_bytes_equal(found, (1 + bias).bfloat16().expand_as(found), "one pass after torch's product")
    if backend == "native":
        with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
            gemm(a, b, backend=backend)
        return
    for _ in range(3):
        assert_bytes_equal(gemm(a, b, backend="auto"), gemm(a, b, backend="exact"), "exact")
    assert calls == [torch.float32, torch.bfloat16]  # asked once


def test_the_exact_backend_reads_swizzled_scales():
    """Which are all that layers keep for native products."""
    for make in (nvfp4(scale_layouts=["swizzled"]), mxfp8_swizzled):
        for side in SIDES:
            a = operand(34, 50, side, make)
            whole = gemm(a, a, backend="exact")
            copy = a.copy
            copy.scale_places = {"swizzled": copy.scales["swizzled"]}
            assert_bytes_equal(gemm(a, a, backend="exact"), whole, side)


def mxfp8_swizzled(x, **copies):
    return zerofp4.quantize_mxfp8(x, scale_layouts=["swizzled"], **copies)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("recipe", [nn.NVFP4Recipe, nn.MXFP8Recipe])
def test_a_layer_launches_nothing_beside_its_products(cublaslt, recipe, adds):
    """But quantization, alpha and the sum that is the bias' gradient: no float32 result is added to, or
    rounded, in a pass of its own.
    """
    cublaslt.computes = False
    layer = nn.Linear(64, 128, dtype=torch.bfloat16, fuse_wgrad_accumulation=adds)
    x = values(32, 64).bfloat16().requires_grad_()
    if adds:
        layer.weight.main_grad = torch.zeros(128, 64)
    with torch.profiler.profile() as profile, nn.autocast(recipe(backend="native")):
        y = layer(x)
        y.backward(torch.ones_like(y))
    assert [(p.output, p.has_bias, p.accumulate) for p in cublaslt.ran] == [
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, False),
        (torch.float32 if adds else torch.bfloat16, False, adds),
    ]
    # MXFP8 stores its columnwise copies as the others.
    passes = {"add", "add_", "mul", "mul_", "_to_copy", "constant_pad_nd"}
    passes |= {"copy_", "clone"} if recipe is nn.NVFP4Recipe else set()
    ran = {event.key.partition("::")[2] for event in profile.key_averages() if "aten::" in event.key}
    assert not passes & ran, ran
