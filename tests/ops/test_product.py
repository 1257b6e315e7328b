"""The operators that products are made of, in torch.library, and the rule of cuBLASLt."""

import itertools

import pytest
import torch
from helpers import assert_all_equal, assert_bytes_equal, needs_gpu, poisoned_allocations
from tensor_helpers import values

import zerofp4
from zerofp4 import _C, ops

ZEROFP4 = torch.ops.zerofp4
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CODES = torch.uint8


def copies(device, sizes=(32, 48), contraction=64):
    """The arguments of product_values, of two tensors."""
    made = [
        zerofp4.quantize(values(rows, contraction, device=device, seed=rows), block=block)
        for rows, block in zip(sizes, ((1, 16), (16, 16)), strict=True)
    ]
    columns = [(t.rowwise_data, t.rowwise_scale.view(torch.uint8), t.amax, t.block[0], 448) for t in made]
    return [list(column) for column in zip(*columns, strict=True)]


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_opcheck(device, dtype):
    torch.library.opcheck(ZEROFP4.product_values.default, (*copies(device), dtype))
    _, _, amaxes, _, maxima = copies(device)
    torch.library.opcheck(ZEROFP4.product_alpha.default, (amaxes, maxima))
    a, b = values(32, 64, device=device, dtype=dtype), values(48, 64, device=device, dtype=dtype)
    alpha, bias = torch.ones(1, device=device), values(48, device=device)
    torch.library.opcheck(ZEROFP4.scaled_product.default, (a, b, alpha, bias, BF16))
    out = torch.zeros(32, 48, device=device)
    torch.library.opcheck(ZEROFP4.add_scaled_product.default, (a, b, alpha, None, out))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)), ids=str)
def test_any_orientation(device, transposed, dtype):
    """Small integers, whose sums every dtype and order gets exactly."""
    matrices = [torch.randint(-4, 5, (rows, 34)).to(device, dtype) for rows in (18, 50)]
    expected = matrices[0].double().cpu() @ matrices[1].double().cpu().t() * 0.5
    a, b = (m.t().contiguous().t() if t else m for m, t in zip(matrices, transposed, strict=True))
    alpha = torch.full((1,), 0.5, device=device)
    for out_dtype in (BF16, F16, F32):
        with poisoned_allocations():
            actual = ZEROFP4.scaled_product(a, b, alpha, None, out_dtype)
        assert_bytes_equal(actual.cpu(), expected.to(out_dtype), f"{out_dtype}")
        one = ZEROFP4.scaled_product(a, b, None, None, out_dtype)
        assert_bytes_equal(one.cpu(), (2 * expected).to(out_dtype), f"{out_dtype}, without alpha")
    out = torch.ones(18, 50, device=device)
    ZEROFP4.add_scaled_product(a, b, alpha, None, out)
    assert_bytes_equal(out.cpu(), (expected + 1).float(), "added")


def test_strides_that_are_neither(device):
    wide = torch.randint(-4, 5, (18, 64)).to(device, BF16)
    a, b = wide[:, ::2], wide[:, 1::2]
    expected = ZEROFP4.scaled_product(a.contiguous(), b.contiguous(), None, None, F32)
    assert_bytes_equal(ZEROFP4.scaled_product(a, b, None, None, F32), expected, "every second column")


@pytest.mark.heavy
def test_compiles_to_the_same_bytes(device):
    """A compiled graph calls what is called without it: another product would have another order of sums."""
    arguments, bias = copies(device), values(48, device=device)

    def use(bias):
        a, b, alpha = ZEROFP4.product_values(*arguments, F32 if device.type == "cpu" else BF16)
        out = torch.zeros(32, 48, device=device)
        ZEROFP4.add_scaled_product(a, b, alpha, None, out)
        return ZEROFP4.scaled_product(a, b, alpha, bias * 2, BF16) + 1, out

    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    assert_all_equal(compiled(bias), use(bias), "compiled")


# The rule


@pytest.mark.parametrize(
    ("inputs", "rows", "out_dtype", "bias_dtype", "asked"),
    [
        # rounded and with a bias in one, where the epilogue has that
        (BF16, 48, BF16, None, [(BF16, False)]),
        (BF16, 48, BF16, BF16, [(BF16, True)]),
        (BF16, 50, BF16, BF16, [(F32, True)]),
        (BF16, 48, BF16, F32, [(F32, True)]),
        (BF16, 48, F16, None, [(F32, False)]),
        (BF16, 50, F32, BF16, [(F32, True)]),
        # with scales, and what is asked next
        (CODES, 48, BF16, None, [(BF16, False), (F32, False)]),
        (CODES, 48, F16, F16, [(F16, True), (F32, False)]),
        (CODES, 48, BF16, F32, [(F32, False)]),
        (CODES, 48, F32, F32, [(F32, False)]),
        (CODES, 48, F32, None, [(F32, False)]),
    ],
    ids=str,
)
def test_what_cublaslt_is_asked_for(inputs, rows, out_dtype, bias_dtype, asked):
    assert ops.product.epilogues(inputs, rows, out_dtype, bias_dtype) == asked


def test_the_rule_is_visible():
    """Which library multiplies, or why it is torch."""
    said = zerofp4.build_info()["cuda"]["products"]
    if torch.version.cuda is None:
        assert said == f"torch.mm: torch {torch.__version__} was built without CUDA"
    elif zerofp4.build_info()["cuda"]["compiled"]:
        assert said.startswith(f"cuBLASLt {torch.version.cuda.partition('.')[0]}."), said


def test_a_library_that_is_not_there_is_named():
    built = zerofp4.build_info()["cuda"]["compiled"]
    message = (
        "libcublasLt.so.999 is not loaded in this process" if built else "zerofp4 was built without CUDA"
    )
    with pytest.raises(RuntimeError, match=message):
        _C.load_cublaslt("libcublasLt.so.999")


@needs_gpu
def test_cublaslt_multiplies_on_a_gpu(monkeypatch):
    """Nothing of torch's is called, and one kernel at most after the values."""
    device = torch.device("cuda", 0)
    a, b = values(33, 98, device=device), values(47, 98, device=device, seed=1)
    monkeypatch.setattr(ops.product, "_by_torch", None)
    for out_dtype, bias_dtype in itertools.product((BF16, F32), (None, BF16, F32)):
        bias = None if bias_dtype is None else torch.zeros(47, device=device, dtype=bias_dtype)
        ops.scaled_product(a, b, torch.ones(1, device=device), bias, out_dtype)
    ops.add_scaled_product(a, b, None, None, torch.zeros(33, 47, device=device))


@needs_gpu
def test_without_cublaslt_torch_multiplies(monkeypatch):
    device = torch.device("cuda", 0)
    a, b = (torch.randint(-4, 5, (rows, 34)).to(device, BF16) for rows in (18, 50))
    expected = ops.scaled_product(a, b, None, None, F32)
    monkeypatch.setattr(ops.product, "why_no_cublaslt", lambda: "for a test")
    monkeypatch.setattr(ops.product, "multiply", None)
    assert_bytes_equal(ops.scaled_product(a, b, None, None, F32), expected, "torch")


@needs_gpu
def test_an_algorithm_is_asked_for_once():
    device = torch.device("cuda", 0)
    a, b = values(40, 112, device=device), values(56, 112, device=device, seed=1)
    before = ops.product._product.cache_info()
    for _ in range(3):
        ops.scaled_product(a, b, None, None, F32)
    after = ops.product._product.cache_info()
    assert after.misses - before.misses <= 1 and after.hits - before.hits >= 2
