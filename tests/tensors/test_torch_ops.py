"""Operations on NVFP4Tensors: what writes, what multiplies and has gradients, also under torch.compile."""

from functools import partial

import pytest
import torch
from cases.mxfp8 import formats as of_both_formats
from helpers import assert_bytes_equal
from tensor_helpers import ALL, DTYPES, addresses, assert_quantized, assert_record_equal, make, values
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4.format import SCALE_LAYOUTS

# Writing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
def test_copy_of_plain_values_requantizes_in_place(device, dtype, block):
    t = zerofp4.quantize(values(34, 50, device=device, dtype=dtype), block=block, **ALL)
    before, x = addresses(t), values(34, 50, dtype=torch.float32, seed=1)
    assert t.copy_(x) is t
    assert_quantized(t, x.to(device, dtype), block[0])
    t.copy_(x[0].double())  # broadcasts
    assert_quantized(t, x[0].expand(34, 50).to(device, dtype), block[0])
    assert addresses(t) == before
    with pytest.raises(RuntimeError, match="size"):
        t.copy_(torch.zeros(3, 50))


@pytest.mark.parametrize(
    "source", [{"columnwise": False}, {"rowwise": False}, {}, {"scale_layouts": ["compact"]}]
)
def test_copy_of_a_quantized_tensor_copies_bytes(device, source):
    """What the source lacks follows from what it has. Quantizing its values again would give another amax."""
    amax = torch.full((1,), 9.0, device=device)
    original = make(device, (34, 72), amax=amax)
    bare = make(device, (34, 72), amax=amax, **source)
    target = zerofp4.empty((34, 72), device=device, dtype=torch.float32, scale_layouts=SCALE_LAYOUTS)
    before = addresses(target)
    target.copy_(bare)
    assert_record_equal(target, original)
    assert addresses(target) == before


def test_zero_and_fill(device):
    t = make(device, (34, 72))
    before = addresses(t)
    for act, value in (
        (lambda: t.fill_(-0.3), -0.3),
        (lambda: t.fill_(torch.tensor(7.0)), 7.0),
        (lambda: t.fill_(-0.0), -0.0),
        (lambda: t.zero_(), 0.0),
    ):
        assert act() is t
        assert_quantized(t, torch.full((34, 72), value, dtype=t.dtype, device=device))
    assert addresses(t) == before
    parameter = nn.Parameter(t)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.zero_()
    nn.init.zeros_(parameter)
    assert not parameter.dequantize().any()


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda t: t.add_(1), "aten.add_"),
        (lambda t: t.__imul__(2), "aten.mul_"),
        (lambda t: nn.init.normal_(t), "aten.normal_"),
        (lambda t: t.t_(), "aten.t_"),
        (lambda t: t.resize_(2, 2), "aten.resize_"),
        (lambda t: t.set_(torch.zeros(2, dtype=t.dtype)), "aten.set_"),
        (lambda t: t.index_fill_(0, torch.tensor([0]), 1), "aten.index_fill_"),
        (lambda t: t.__setitem__(0, 1), "indexed assignment"),
        (lambda t: t.__setitem__(t > 0, 1), "indexed assignment"),
        (lambda t: torch._foreach_mul_([torch.ones(2), t], 2), "aten._foreach_mul_"),
        (lambda t: torch.add(torch.ones(48, 80), 1, out=t), "aten.add.out"),
        (lambda t: torch.mm(torch.ones(48, 2), torch.ones(2, 80), out=t), "aten.mm.out"),
        (lambda t: t.apply_(lambda x: x), "apply_"),
        (lambda t: t.map2_(torch.ones(48, 80), torch.ones(48, 80), lambda x, y, z: x), "map2_"),
    ],
)
def test_other_writes_are_refused_and_say_what_to_do(act, name):
    t = make("cpu")
    before = t.clone()
    t.grad = torch.ones(48, 80, dtype=t.dtype)
    with pytest.raises(RuntimeError, match=f"{name}.* writes to an NVFP4Tensor.*copy_ that, which requant"):
        act(t)
    assert_record_equal(t, before)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_of_torch_is_sent_to_ours(optimizer_class, foreach):
    t = make("cpu")
    before = t.clone()
    t.grad = torch.ones(48, 80, dtype=t.dtype)
    with pytest.raises(RuntimeError, match=r"writes to an NVFP4Tensor.* use zerofp4\.optim\.ZeroFP4Opt"):
        optimizer_class([t], lr=1.0, weight_decay=0.1, foreach=foreach).step()
    assert_record_equal(t, before)


# Products

# Gradients, and products that torch folds or batches as it sees fit, are sums in another order than the
# expected ones: float32 rounding of at most 240 terms.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


formats = pytest.mark.parametrize("quantize", [zerofp4.quantize, zerofp4.quantize_mxfp8])


def weight(device, *shape, quantize=zerofp4.quantize, **options):
    x = values(*shape, device=device, dtype=torch.float32, seed=2)
    return nn.Parameter(quantize(x, **options))


def plain_leaf(x):
    is_quantized = isinstance(x, zerofp4.NVFP4Tensor | zerofp4.MXFP8Tensor)
    values = x.detach().dequantize() if is_quantized else x.detach().clone()
    return values.requires_grad_(x.requires_grad)


def gradients(function, *inputs):
    """(result, gradients of the inputs that require them) for one and the same gradient of the result."""
    for x in inputs:
        x.grad = None
    result = function(*inputs)
    result.backward(values(*result.shape, device=result.device, dtype=result.dtype, seed=3))
    return result, [x.grad for x in inputs if x.requires_grad]


def assert_like_dequantized(function, *inputs, exact=False):
    """The same result and gradients as with plain leaves that hold the dequantized values."""
    actual, grads = gradients(function, *inputs)
    expected, plain_grads = gradients(function, *map(plain_leaf, inputs))
    assert type(actual) is torch.Tensor
    torch.testing.assert_close(actual, expected, **({"rtol": 0, "atol": 0} if exact else CLOSE))
    for grad, wanted in zip(grads, plain_grads, strict=True):
        assert type(grad) is torch.Tensor and grad.dtype == wanted.dtype
        torch.testing.assert_close(grad, wanted, **CLOSE)


@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)])
def test_linear(device, leading, bias, block):
    x = values(*leading, 80, device=device, dtype=torch.float32).requires_grad_()
    b = [values(48, device=device, dtype=torch.float32).requires_grad_()] if bias else []
    assert_like_dequantized(F.linear, x, weight(device, 48, 80, block=block), *b, exact=True)


PRODUCTS = {
    "matmul": torch.matmul,
    "method": lambda a, b: a.matmul(b),
    "operator": lambda a, b: a @ b,
    "keyword": lambda a, b: torch.matmul(a, other=b),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("left", [(80,), (5, 80), (2, 3, 80), (48, 80)])
@pytest.mark.parametrize("right", [(80,), (80, 48), (2, 80, 6), (3, 80, 48)])
def test_matmul(device, product, left, right):
    """With a weight on either side, if it can be one, and what torch broadcasts."""
    if len(left) == len(right) == 3 and left[0] != right[0]:
        pytest.skip("two stacks of different sizes")
    plain = partial(values, device=device, dtype=torch.float32)
    if len(right) > 1:
        assert_like_dequantized(product, plain(*left).requires_grad_(), weight(device, *right))
    if len(left) > 1 and left[-2] % 2 == 0:
        assert_like_dequantized(product, weight(device, *left), plain(*right).requires_grad_())


def test_two_quantized_operands_and_mm(device):
    a, b = weight(device, 48, 80), weight(device, 80, 32)
    assert_like_dequantized(torch.mm, a, b)
    assert_like_dequantized(lambda a, b: a.mm(b), a, values(80, 6, device=device, dtype=torch.float32))
    assert_like_dequantized(F.linear, weight(device, 6, 80).requires_grad_(False), a)
    out = torch.empty(48, 32, device=device)
    torch.mm(a.detach(), b.detach(), out=out)
    torch.testing.assert_close(out, torch.mm(a, b).detach(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="mat"):
        torch.mm(a, values(2, 80, 48, device=device))
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(values(4, 80, device=device, dtype=torch.float16), a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_keeps_codes_and_gradients_have_the_logical_dtype(device, dtype):
    p = nn.Parameter(zerofp4.quantize(values(48, 80, device=device, dtype=dtype)))
    x = values(4, 80, device=device, dtype=dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = F.linear(x, p) + torch.matmul(p, x.t()).t()
    assert out.dtype == dtype
    assert sorted(type(t).__name__ for t in kept) == ["NVFP4Tensor", "NVFP4Tensor", "Tensor", "Tensor"]
    assert all(t.record is p.record for t in kept if isinstance(t, zerofp4.NVFP4Tensor))
    assert all(t.numel() == x.numel() for t in kept if not isinstance(t, zerofp4.NVFP4Tensor))
    out.sum().backward()
    assert (type(p.grad), p.grad.dtype, p.grad.shape) == (torch.Tensor, dtype, p.shape)
    first = p.grad.clone()
    p.dequantize().sum().backward()
    torch.testing.assert_close(p.grad, first + 1, rtol=0, atol=0)  # accumulated


def test_backward_saves_only_what_it_needs():
    x, frozen = values(4, 80, dtype=torch.float32), weight("cpu", 48, 80).requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = F.linear(x.requires_grad_(), frozen)
    assert [type(t) for t in kept] == [zerofp4.NVFP4Tensor]
    out.sum().backward()
    assert x.grad is not None and frozen.grad is None
    assert not F.linear(x.detach(), frozen).requires_grad
    with torch.no_grad():
        assert not F.linear(x, weight("cpu", 48, 80)).requires_grad


FUNCTIONS = {
    "products": lambda w: F.linear(torch.ones(2, 80, device=w.device), w) @ w,
    "scaled": lambda w: w * 3,
    "squared": lambda w: w * w,
    "transposed": lambda w: w.t(),
    "viewed": lambda w: w.view(-1, 8)[1:],
    "split": lambda w: torch.cat(w.split(16)[::-1]),
    "other dtype": lambda w: w.to(torch.float16).float(),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "addmm": lambda w: torch.addmm(w[:, :48], w, w.t()),
    "clone": lambda w: w.clone() + 0,
}


@formats
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_other_functions_dequantize_and_gradients_flow(device, function, quantize):
    assert_like_dequantized(function, weight(device, 48, 80, quantize=quantize))


def test_dequantize_is_differentiable(device):
    w = weight(device, 48, 80)
    for function in (torch.dequantize, lambda w: w.dequantize(), lambda w: w.dequantize(torch.bfloat16)):
        result, (grad,) = gradients(function, w)
        expected = values(48, 80, device=device, dtype=result.dtype, seed=3).float()
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_a_write_to_a_view_changes_nothing():
    t = make("cpu")
    before = t.clone()
    t.view(-1).zero_()
    t[0].fill_(1)
    assert_record_equal(t, before)


def test_writing_a_quantized_tensor_into_a_plain_one(device):
    t = make(device)
    plain = torch.ones(48, 80, device=device, dtype=t.dtype)
    assert plain.add_(t) is plain
    torch.testing.assert_close(plain, 1 + t.dequantize(), rtol=0, atol=0)
    module = nn.Linear(80, 48, dtype=t.dtype, device=device)
    with torch.no_grad():
        module.weight.copy_(t)
    assert type(module.weight) is nn.Parameter
    torch.testing.assert_close(module.weight.detach(), t.dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_without_gradients_has_the_same_bytes(device, bias, autocasts):
    weight = nn.Parameter(zerofp4.quantize(values(34, 48, device=device), columnwise=True))
    b = values(34, seed=2, device=device).requires_grad_() if bias else None
    x = values(3, 6, 48, seed=1, device=device).requires_grad_()
    for given in (x, nn.Parameter(zerofp4.quantize(x.detach().view(18, 48), block=(1, 16)))):
        with torch.autocast(device.type, torch.float16, enabled=autocasts):
            expected = F.linear(given, weight, b)
            assert expected.requires_grad
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    y = F.linear(given, weight, b)
                assert type(y) is torch.Tensor and not y.requires_grad
                assert_bytes_equal(y.clone(), expected.detach(), mode.__name__)


def test_inference_mode(device):
    """Products in it are looked at above."""
    p, x = weight(device, 48, 80), values(4, 80, device=device, dtype=torch.float32)
    with torch.inference_mode():
        made = zerofp4.quantize(x)
        assert made.is_inference() and made.detach().is_inference()
        assert not p.detach().is_inference() and not p.data.is_inference()
        assert torch.equal(made.copy_(x).dequantize(), made.clone().dequantize())


def test_second_derivatives():
    x, p = values(4, 8, dtype=torch.float32), weight("cpu", 16, 8)
    for function in (F.linear, lambda x, w: x @ w.t(), lambda x, w: torch.matmul(w, x.t())):
        results = []
        for w in (p, p.detach().dequantize().requires_grad_()):
            leaf = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(function(leaf, w).square().sum(), leaf, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), (leaf, w)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, **CLOSE)


def test_modules_that_do_not_call_linear_forward():
    """MultiheadAttention hands its output layer's weight to a function of its own."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, dtype=torch.bfloat16)
    plain = nn.MultiheadAttention(32, 2, dtype=torch.bfloat16)
    plain.load_state_dict(attention.state_dict())
    attention.out_proj.weight = nn.Parameter(zerofp4.quantize(attention.out_proj.weight))
    plain.out_proj.weight.data.copy_(attention.out_proj.weight)
    x = values(5, 3, 32)
    for module in (attention, plain):
        module(x, x, x)[0].sum().backward()
    assert torch.equal(attention(x, x, x)[0], plain(x, x, x)[0])
    torch.testing.assert_close(attention.out_proj.weight.grad, plain.out_proj.weight.grad)


# torch.compile without graph breaks: "eager" runs what dynamo traced, "aot_eager" what autograd traced too.


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend=request.param)
    torch._dynamo.reset()


@pytest.mark.heavy
def test_compiled_linear(device, compiled):
    module = nn.Linear(80, 48, device=device)
    module.weight = weight(device, 48, 80, columnwise=True, scale_layouts=SCALE_LAYOUTS)
    x = values(4, 80, device=device, dtype=torch.float32).requires_grad_()
    run = compiled(module)
    leaves = (x, module.weight, module.bias)
    for _ in range(2):  # again with other bytes in the same places, and in another place
        (actual, grads), (expected, eager_grads) = (
            gradients(lambda *_, f=f: f(x), *leaves) for f in (run, module)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        for grad, wanted in zip(grads, eager_grads, strict=True):
            assert type(grad) is torch.Tensor
            torch.testing.assert_close(grad, wanted, rtol=0, atol=0)
        module.weight.data.copy_(values(48, 80, seed=4))
        module.weight.rowwise_data = module.weight.rowwise_data.clone()


@formats
@pytest.mark.heavy
def test_compiled_products_and_unknown_functions(device, compiled, quantize):
    def function(x, w):
        y = torch.matmul(w, x.t()).sum() + torch.mm(w, x.t()).sum() + (x @ w.t()).sum()
        return y + (w * 2).exp() + w.dequantize() + w.dequantize(torch.bfloat16)

    x = values(4, 80, device=device, dtype=torch.float32).requires_grad_()
    w = weight(device, 48, 80, quantize=quantize)
    (actual, grads), (expected, eager_grads) = (gradients(f, x, w) for f in (compiled(function), function))
    torch.testing.assert_close(actual, expected, **CLOSE)
    for grad, wanted in zip(grads, eager_grads, strict=True):
        torch.testing.assert_close(grad, wanted, **CLOSE)


@of_both_formats
@pytest.mark.heavy
def test_compiled_copy_clone_and_detach(device, compiled, make_format):
    def write(t, x):
        t.copy_(x)
        return t.clone(), t.dequantize()

    t, x = make_format(device), values(48, 80, device=device, seed=1)
    before, expected = addresses(t), t.clone().copy_(x)
    clone, dequantized = compiled(write)(t, x)
    assert addresses(t) == before
    assert_record_equal(t, expected)
    assert_record_equal(clone, t)
    assert torch.equal(dequantized, t.dequantize())
    clone, detached = compiled(lambda t: (t.clone(), t.detach()))(t)
    assert clone.rowwise_data.data_ptr() != t.rowwise_data.data_ptr() == detached.rowwise_data.data_ptr()


@pytest.mark.heavy
def test_compiled_reading_of_buffers(device, compiled):
    def read(t):
        return t.rowwise_data + 0, t.swizzled_scale(columnwise=True).view(torch.uint8) + 0

    t = make(device, scale_layouts=["compact"])
    codes, scale = compiled(read)(t)
    assert torch.equal(codes, t.rowwise_data)
    assert torch.equal(scale, t.swizzled_scale(columnwise=True).view(torch.uint8))
