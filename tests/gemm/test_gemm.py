"""zerofp4.gemm: which product it is, what is done to its sums, where it writes."""

import itertools

import pytest
import torch
from cases.gemm import NVFP4, SHAPES, SIDES, TRANSFORMS, nvfp4, operand, relative_error
from helpers import assert_bytes_equal, nothing_waits, poisoned_allocations
from tensor_helpers import DTYPES, values

import zerofp4
from zerofp4 import Operand, gemm, ops
from zerofp4.blackwell_check import alpha, product_of, specified
from zerofp4.gemm.exact import factor_dtype

BOTH_SIDES = list(itertools.product(SIDES, SIDES))


def tolerance(device) -> float:
    """Of float32 sums in whatever order, relative to their Frobenius norm."""
    return 1e-6 if device.type == "cpu" else 1e-5


def assert_product(a, b, device):
    actual = gemm(a, b, out_dtype=torch.float32)
    expected = product_of(a, b)
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    assert relative_error(actual, expected) <= tolerance(device)
    return actual


@pytest.mark.parametrize("sides", BOTH_SIDES, ids=map("-".join, BOTH_SIDES))
@pytest.mark.parametrize("options", NVFP4.values(), ids=NVFP4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(device, shape, options, sides):
    m, n, k = shape
    # Rows of a columnwise copy were columns, of which there is an even number.
    m, n = (size + (side == "columnwise") * (size % 2) for size, side in zip((m, n), sides, strict=True))
    a = operand(m, k, sides[0], nvfp4(**options), device=device, seed=1)
    b = operand(n, k, sides[1], nvfp4(**options), device=device, seed=2)
    assert_product(a, b, device)


@pytest.mark.parametrize("options", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 33, 130])
def test_the_transform_of_both_cancels(device, tokens, options):
    make = nvfp4(block=(1, 16), hadamard=True, **options)
    a = operand(34, tokens, "columnwise", make, device=device, seed=1)
    b = operand(48, tokens, "columnwise", make, device=device, seed=2)
    actual = assert_product(a, b, device)
    if tokens >= 130:  # two roundings to 4 bits, of which each is off by about 9 %
        exact = values(tokens, 34, seed=1).double().t() @ values(tokens, 48, seed=2).double()
        assert relative_error(actual, exact) < 0.2


@pytest.mark.parametrize("sides", BOTH_SIDES, ids=map("-".join, BOTH_SIDES))
@pytest.mark.parametrize("shape", [*SHAPES, (7, 9, 33), (5, 40, 65)], ids=str)
def test_mxfp8(device, shape, sides):
    m, n, k = shape
    a = operand(m, k, sides[0], zerofp4.quantize_mxfp8, device=device, seed=1)
    b = operand(n, k, sides[1], zerofp4.quantize_mxfp8, device=device, seed=2)
    assert_product(a, b, device)


def test_records_stand_for_their_tensors(device):
    a, b = (zerofp4.quantize(values(32, 64, device=device, seed=i), block=(1, 16)) for i in range(2))
    assert_bytes_equal(gemm(a.record, b.record), gemm(a, b), "product")
    assert gemm(a, b).dtype == torch.bfloat16


def test_more_dimensions_are_rows(device):
    x, w = values(4, 8, 64, device=device), zerofp4.quantize(values(32, 64, device=device, seed=1))
    flat = zerofp4.quantize(x.view(32, 64), block=(1, 16))
    assert_bytes_equal(gemm(zerofp4.quantize(x, block=(1, 16)), w), gemm(flat, w), "product")


# What is done to the sums


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
def test_alpha_then_bias_then_one_rounding(monkeypatch, device, out_dtype, bias_dtype):
    """Bitwise: the sums themselves are taken from a product of the same sizes."""
    if device.type == "cuda":
        monkeypatch.setattr(ops.product, "multiply", lambda *_: False)  # which may fuse them
    a, b = (zerofp4.quantize(values(32, 64, device=device, seed=i), block=(1, 16)) for i in range(2))
    bias = None if bias_dtype is None else values(32, device=device, dtype=bias_dtype, seed=3)

    def unrounded(out_dtype):
        dtype = factor_dtype(Operand(a), out_dtype)
        left, right = (specified(Operand(t)).to(device, dtype) for t in (a, b))
        on_cuda = {"out_dtype": torch.float32} if device.type == "cuda" else {}
        sums = torch.mm(left, right.t(), **on_cuda)
        scaled = sums * alpha(Operand(a), Operand(b)).to(device)
        return scaled if bias is None else scaled + bias.float()

    actual = gemm(a, b, out_dtype=out_dtype, bias=bias)
    assert_bytes_equal(actual, unrounded(out_dtype).to(out_dtype), "product")
    target = values(32, 32, device=device, dtype=torch.float32, seed=4)
    before, address = target.clone(), target.data_ptr()
    assert gemm(a, b, bias=bias, accumulate_into=target) is target
    assert target.data_ptr() == address
    assert_bytes_equal(target, before + unrounded(torch.float32), "accumulated")


def rounding_of(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("make", [nvfp4(block=(1, 16)), zerofp4.quantize_mxfp8], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize(
    "shape", [(33, 47, 98), (64, 96, 128), (1, 3, 2), (129, 1, 34), (512, 24, 1024)], ids=str
)
def test_one_rounding(device, shape, out_dtype, bias_dtype, make):
    """Against float64: each element is off by what its dtype rounds, and a little of the sum's own."""
    m, n, k = shape
    a = operand(m, k, "rowwise", make, device=device, seed=1)
    b = operand(n, k, "rowwise", make, device=device, seed=2)
    bias = None if bias_dtype is None else values(n, device=device, dtype=bias_dtype, seed=3) * k
    exact = product_of(a, b, bias)
    with poisoned_allocations():
        actual = gemm(a, b, out_dtype=out_dtype, bias=bias)
    assert actual.dtype == out_dtype
    slack = tolerance(device) * exact.norm() / exact.numel() ** 0.5
    assert ((actual.cpu().double() - exact).abs() <= rounding_of(out_dtype) * exact.abs() + slack).all()
    if out_dtype == torch.float32:
        assert relative_error(actual, exact) <= tolerance(device)


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("shape", [(33, 47, 98), (64, 96, 128)], ids=str)
def test_accumulation(device, shape, offset, bias_dtype):
    """At addresses of every alignment, such as a slice of a flat buffer of gradients has."""
    m, n, k = shape
    make = nvfp4(block=(1, 16))
    a = operand(m, k, "rowwise", make, device=device, seed=1)
    b = operand(n, k, "rowwise", make, device=device, seed=2)
    bias = None if bias_dtype is None else values(n, device=device, dtype=bias_dtype, seed=3)
    flat = values(m * n + 8, device=device, dtype=torch.float32, seed=4)
    before, target = flat.clone(), flat[offset : offset + m * n].view(m, n)
    expected = product_of(a, b, bias)
    expected = expected + target.cpu().double()
    assert gemm(a, b, bias=bias, accumulate_into=target) is target
    assert relative_error(target, expected) <= tolerance(device)
    for part in (slice(None, offset), slice(offset + m * n, None)):
        assert_bytes_equal(flat[part], before[part], "what lies around it")


def test_a_bias_that_is_a_view(device):
    a = zerofp4.quantize(values(32, 64, device=device), block=(1, 16))
    wide = values(64, device=device, dtype=torch.float32, seed=1)
    whole = gemm(a, a, out_dtype=torch.float32, bias=wide[::2].contiguous())
    assert_bytes_equal(gemm(a, a, out_dtype=torch.float32, bias=wide[::2]), whole, "strided")
    assert_bytes_equal(
        gemm(a, a, out_dtype=torch.float32, bias=(-wide[::2]).resolve_neg()),
        gemm(a, a, out_dtype=torch.float32, bias=torch._neg_view(wide[::2])),
        "negated",
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false")
def test_nothing_waits_and_a_graph_can_hold_it():
    """Of a product with alpha, bias and accumulation; replayed with other operands, it reads their alpha."""
    device = torch.device("cuda", 0)
    quantizer = zerofp4.Quantizer(block=(1, 16))
    x = values(64, 128, device=device)
    a, b = quantizer(x), zerofp4.quantize(values(96, 128, device=device, seed=1))
    bias = values(96, device=device, seed=2)
    target = torch.zeros(64, 96, device=device)

    def step():
        return gemm(a, b, bias=bias), gemm(a, b, accumulate_into=target)

    step()
    with nothing_waits():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = step()
    quantizer.update_(a, 1000 * values(64, 128, device=device, seed=3))
    target.zero_()
    graph.replay()
    assert_bytes_equal(captured, gemm(a, b, bias=bias), "replayed")
    expected = product_of(Operand(a), Operand(b))
    assert relative_error(target, expected) <= tolerance(device)


def test_by_default_the_dtype_is_what_both_promote_to():
    a, b = (zerofp4.quantize(values(32, 64, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert gemm(a, a).dtype == torch.bfloat16 and gemm(b, b).dtype == torch.float16
    assert gemm(a, b).dtype == torch.float32


def test_no_history():
    bias = torch.zeros(32, requires_grad=True)
    a = zerofp4.quantize(values(32, 64))
    assert not gemm(a, a, bias=bias).requires_grad


@pytest.mark.parametrize("shape", [(0, 32, 64), (32, 0, 64), (32, 32, 0)], ids=str)
@pytest.mark.parametrize("make", [zerofp4.quantize, zerofp4.quantize_mxfp8])
def test_no_elements(device, make, shape):
    m, n, k = shape
    a, b = (make(values(rows, k, device=device)) for rows in (m, n))
    bias = torch.arange(n, device=device, dtype=torch.float32)
    for backend in ("auto", "exact"):
        out = gemm(a, b, bias=bias, backend=backend)
        assert_bytes_equal(out, bias.bfloat16().expand(m, n).contiguous(), "only the bias")
    target = torch.ones(m, n, device=device)
    assert_bytes_equal(gemm(a, b, accumulate_into=target), torch.ones(m, n, device=device), "nothing added")


def test_a_tensor_that_is_not_finite_gives_no_finite_product(device):
    x = values(32, 64, device=device)
    x[3, 5] = torch.inf
    a = zerofp4.quantize(x, block=(1, 16))
    assert not gemm(a, zerofp4.quantize(values(16, 64, device=device)))[3].isfinite().any()


def test_autocast_does_not_reach_the_sums(device):
    """It would round them to its dtype before alpha and bias."""
    a = zerofp4.quantize(values(32, 64, device=device))
    with torch.autocast(device.type, torch.bfloat16):
        inside = gemm(a, a, out_dtype=torch.float32)
    assert_bytes_equal(inside, gemm(a, a, out_dtype=torch.float32), "product")


# Bad input


def bad(**options):
    return lambda a, b: gemm(a, b, **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, b: gemm(a.dequantize(), b), TypeError, "a must be an NVFP4Tensor, .* got Tensor"),
        (lambda a, b: gemm(a, 3), TypeError, "b must be an NVFP4Tensor, .* got int"),
        (lambda a, b: gemm(a, Operand(b, columnwise=True)), ValueError, "the columnwise copy is to be"),
        (lambda a, b: Operand(None), TypeError, "tensor must be an NVFP4Tensor, .* got NoneType"),
        (
            lambda a, b: gemm(a, zerofp4.quantize(values(32, 96))),
            ValueError,
            r"same contraction size, got 64 of a \[32, 64\] \(rowwise\) and 96 of b \[32, 96\]",
        ),
        (lambda a, b: gemm(a, zerofp4.quantize_mxfp8(values(32, 64))), ValueError, "got NVFP4 and MXFP8"),
        (bad(out_dtype=torch.float64), TypeError, r"out_dtype must be one of .* got torch\.float64"),
        (bad(backend="cublas"), ValueError, "backend must be one of .* got 'cublas'"),
        (bad(bias=torch.zeros(31)), ValueError, r"bias must have shape \(32,\) on cpu, got \(31,\) on cpu"),
        (bad(bias=torch.zeros(32, dtype=torch.int8)), TypeError, r"bias must be .* got torch\.int8"),
        (bad(bias=0.5), TypeError, "bias must be a tensor .* got float"),
        (bad(accumulate_into=torch.zeros(32, 31)), ValueError, r"shape \(32, 32\), got \(32, 31\)"),
        (bad(accumulate_into=torch.zeros(32, 32, dtype=torch.bfloat16)), TypeError, r"got torch\.bfloat16"),
        (bad(accumulate_into=torch.zeros(32, 64)[:, ::2]), ValueError, "accumulate_into must be contiguous"),
        (
            bad(accumulate_into=torch.zeros(32, 32), out_dtype=torch.bfloat16),
            ValueError,
            r"out_dtype must be torch\.float32, or not given, with accumulate_into, got torch\.bfloat16",
        ),
    ],
)
def test_bad_input(call, error, message):
    a, b = zerofp4.quantize(values(32, 64)), zerofp4.quantize(values(32, 64))
    with pytest.raises(error, match=message):
        call(a, b)


def test_one_transform_alone_is_refused():
    x = values(32, 64)
    options = ({"hadamard": True}, {"hadamard": True, "random_signs": False}, {})
    made = [zerofp4.quantize(x, block=(1, 16), columnwise=True, **each) for each in options]
    signs, without, plain = (Operand(t, columnwise=True) for t in made)
    with pytest.raises(ValueError, match="got the Hadamard transform and no transform"):
        gemm(signs, plain)
    with pytest.raises(
        ValueError, match="got the Hadamard transform without signs and the Hadamard transform"
    ):
        gemm(without, signs)
    gemm(made[0], made[2])  # rowwise copies have none
