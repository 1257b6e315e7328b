"""zerofp4.nn.Linear: by a recipe the products of reference operations, without one an ordinary layer."""

import copy
import pickle

import pytest
import torch
from cases.layers import RECIPES, copies, linear, step
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn
from torch.autograd import forward_ad

import zerofp4
from zerofp4 import NVFP4Tensor, reference
from zerofp4.nn import Linear, MXFP8Recipe, NVFP4Recipe, autocast

BF16 = torch.bfloat16
# (T, K, N) with blocks cut off, groups of rows that the transform completes, one token.
SIZES = [(32, 64, 48), (17, 50, 34), (1, 32, 16), (130, 66, 18)]


def layer(in_features, out_features, seed=0, dtype=BF16, device="cpu", **options):
    torch.manual_seed(seed)
    return Linear(in_features, out_features, dtype=dtype, device=device, **options)


def train(module, x, grad, recipe, *arguments):
    """[y, dx, dw, db] of a step."""
    return step(module, module, recipe, x, *arguments, grad=grad)


def drawn(device="cpu"):
    """The state that the backward pass draws after manual_seed(7)."""
    torch.manual_seed(7)
    return zerofp4.ops.draw_rng_state(torch.device(device), None).cpu()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_bytes_are_those_of_reference_operations(recipe, sizes, dtype):
    """On the CPU, where both take float32 sums in the order of one library."""
    t, k, n = sizes
    module = layer(k, n, dtype=dtype)
    x, grad = values(t, k, dtype=dtype, seed=1), values(t, n, dtype=dtype, seed=2)
    expected = linear(recipe, x, module.weight.detach(), module.bias.detach(), grad, drawn())
    assert_all_equal(train(module, x, grad, recipe), expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "nvfp4, dequantized"])
def test_devices_agree_on_the_operands(device, name):
    """Sums differ in their order only."""
    module = layer(96, 64, device=device)
    on_cpu = layer(96, 64)
    on_cpu.load_state_dict(module.state_dict())
    x, grad = values(50, 96, seed=1), values(50, 64, seed=2)
    recipe = RECIPES[name] if name != "nvfp4" else NVFP4Recipe(stochastic_rounding=False)
    actual = train(module, x.to(device), grad.to(device), recipe)
    for mine, other in zip(actual, train(on_cpu, x, grad, recipe), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=2**-7, atol=2**-7)


def test_shapes_and_gradients_of_more_dimensions():
    module, recipe = layer(64, 48), RECIPES["nvfp4"]
    x, grad = values(2, 8, 64), values(2, 8, 48, seed=1)
    flat = train(module, x.view(16, 64), grad.view(16, 48), recipe)
    actual = train(module, x, grad, recipe)
    assert actual[0].shape == (2, 8, 48) and actual[1].shape == (2, 8, 64)
    assert_all_equal(actual, [flat[0].view(2, 8, 48), flat[1].view(2, 8, 64), *flat[2:]])
    with autocast(recipe):
        assert torch.equal(module(x[0, 0]), module(x[0, :1])[0])  # a vector is a row


@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], RECIPES["mxfp8"]], ids=["nvfp4", "mxfp8"])
def test_without_tokens(recipe):
    module = layer(64, 48)
    y, dx, dw, db = train(module, values(0, 64), values(0, 48), recipe)
    assert y.shape == (0, 48) and dx.shape == (0, 64)
    assert not dw.any() and not db.any()


def test_without_bias():
    module, recipe = layer(64, 48, bias=False), RECIPES["nvfp4"]
    x, grad = values(32, 64), values(32, 48, seed=1)
    *expected, _ = linear(recipe, x, module.weight.detach(), None, grad, drawn())
    assert_all_equal(train(module, x, grad, recipe), expected)


def test_outside_it_is_an_ordinary_layer():
    module = layer(64, 48)
    plain = nn.Linear(64, 48, dtype=BF16)
    plain.load_state_dict(module.state_dict())
    x = values(32, 64)
    assert torch.equal(module(x), plain(x)) and torch.equal(module(x, False), plain(x))
    module.load_state_dict(plain.state_dict())
    assert list(module.state_dict()) == list(plain.state_dict())


# Primary weights


def test_primary_weights_are_what_the_cast_would_make():
    module = layer(64, 48, primary_weights=True)
    plain = layer(64, 48)
    assert isinstance(module.weight, NVFP4Tensor) and isinstance(module.weight, nn.Parameter)
    assert_bytes_equal(module.weight.get_high_precision_init_val(), plain.weight.detach(), "initial value")
    x, grad = values(32, 64), values(32, 48, seed=1)
    recipe = RECIPES["nvfp4"]
    expected = train(plain, x, grad, recipe)
    for first in (None, True, False):
        assert_all_equal(train(module, x, grad, recipe, first), expected)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight.dequantize(), module.bias))


# Accumulation, checkpoints, memory


@pytest.mark.parametrize(
    "recipe", [NVFP4Recipe(stochastic_rounding=False), MXFP8Recipe()], ids=["nvfp4", "mxfp8"]
)
def test_gradients_are_added_to_main_grad(recipe):
    module = layer(64, 48, fuse_wgrad_accumulation=True)
    x, grad = values(32, 64), values(32, 48, seed=1)
    start = values(48, 64, dtype=torch.float32, seed=3)
    module.weight.main_grad = start.clone()
    _, dx, dw, _ = train(module, x, grad, recipe)
    assert dw is None
    q_x, q_g = copies(recipe, "input", x), copies(recipe, "gradient", grad)
    sums = q_g.columnwise.values @ q_x.columnwise.values.t()
    if q_g.columnwise.amax is not None:
        sums = sums * reference.gemm_alpha(q_g.columnwise.amax, q_x.columnwise.amax)
    assert_bytes_equal(module.weight.main_grad, start + sums, "main_grad")
    assert_bytes_equal(dx, train(layer(64, 48), x, grad, recipe)[1], "dx")


def test_a_flag_of_the_parameter_asks_for_a_gradient_of_zeros():
    module = layer(64, 48, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(48, 64)
    module.weight.grad_added_to_main_grad = False
    seen = []
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    dw = train(module, values(32, 64), values(32, 48), RECIPES["nvfp4"])[2]
    assert module.weight.grad_added_to_main_grad is True and seen == [module.weight]
    assert dw.shape == (48, 64) and not dw.any() and module.weight.main_grad.any()


def test_layers_can_be_copied_and_pickled():
    module, x = layer(64, 48), values(32, 64)
    with autocast(RECIPES["nvfp4"]):
        y = module(x, True)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert_bytes_equal(other(x), y, "y")
            with pytest.raises(RuntimeError, match="takes the cached weight, but there is none"):
                other(x, False)


# Bad input


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_tangent_is_refused(device, name):
    x = values(6, 80, device=device)
    with forward_ad.dual_level(), autocast(RECIPES[name]):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer(80, 48, device=device)(forward_ad.make_dual(x, x))


def test_what_a_layer_refuses():
    recipe = RECIPES["nvfp4"]
    with autocast(recipe):
        with pytest.raises(
            ValueError, match=r"x must have 64 values in its last dimension, got shape \(2, 32\)"
        ):
            layer(64, 48)(values(2, 32))
        with pytest.raises(ValueError, match="the last dimension must be even, got 33"):
            layer(33, 48)(values(2, 33))
        with pytest.raises(ValueError, match="rows must be even, got 47"):
            layer(64, 47)(values(2, 64).requires_grad_())
        with pytest.raises(TypeError, match="x must have one of the dtypes"):
            layer(64, 48)(values(2, 64).double())
    with autocast(MXFP8Recipe()), pytest.raises(ValueError, match="an NVFP4Tensor, which MXFP8Recipe cannot"):
        layer(64, 48, primary_weights=True)(values(2, 64))
    with (
        autocast(NVFP4Recipe(weight_block=(1, 16))),
        pytest.raises(ValueError, match=r"use NVFP4Recipe\(weight_block=\(16, 16\)\)"),
    ):
        layer(64, 48, primary_weights=True)(values(2, 64))
    with (
        autocast(NVFP4Recipe(backend="native")),
        pytest.raises(RuntimeError, match="backend 'native' cannot"),
    ):
        layer(64, 48)(values(2, 64))
    with pytest.raises(RuntimeError, match="which is on the meta device"):
        Linear(2, 2, device="meta", primary_weights=True)
    assert Linear(2, 2, dtype=torch.float16).weight.dtype == torch.float16
