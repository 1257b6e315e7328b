"""Layers under torch.compile: one graph without a break, and the bytes of the layer without it."""

from functools import partial

import pytest
import torch
from cases.layers import RECIPES, step
from helpers import assert_all_equal, assert_bytes_equal, needs_gpu
from tensor_helpers import values
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, NVFP4Recipe, autocast
from zerofp4.nn.quantizers import WeightCache

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("fresh_compiler")]

LAYERS = {
    "Linear": lambda **options: Linear(64, 48, **options),
    "no bias": lambda **options: Linear(64, 48, bias=False, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(64, 48, normalization="RMSNorm", **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(64, 48, activation="swiglu", **options),
}


def made(name, device, **options):
    torch.manual_seed(0)
    return LAYERS[name](dtype=torch.bfloat16, device=device, **options)


def compiled(module):
    return torch.compile(module, fullgraph=True, backend="aot_eager")


# Recipes and layers meet in the products alone, and of these the MLP has all.
OTHERS = ["nvfp4, four over six", "nvfp4, dequantized", "mxfp8"]
CROSSED = [
    *((name, "nvfp4") for name in LAYERS),
    *(("LayerNormMLP", recipe) for recipe in OTHERS),
    *(
        pytest.param(name, recipe, marks=pytest.mark.nightly)
        for name in LAYERS
        for recipe in OTHERS
        if name != "LayerNormMLP"
    ),
]


@pytest.mark.parametrize(("name", "recipe"), CROSSED)
def test_forward_and_backward_in_one_graph(device, name, recipe):
    module = made(name, device)
    run, recipe = compiled(module), RECIPES[recipe]
    for x in (values(32, 64, device=device), values(2, 18, 64, device=device, seed=1)):
        assert_all_equal(step(module, run, recipe, x), step(module, module, recipe, x))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4, dequantized"])
@pytest.mark.parametrize("name", LAYERS)
def test_primary_weights(device, name, recipe):
    module, recipe = made(name, device, primary_weights=True), RECIPES[recipe]
    x = values(32, 64, device=device)
    run = compiled(module)
    for _ in range(2):
        assert_all_equal(step(module, run, recipe, x), step(module, module, recipe, x))
        weight = next(p for p in module.parameters() if isinstance(p, zerofp4.NVFP4Tensor))
        weight.data.copy_(values(*weight.shape, device=device, seed=5))


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_the_cache_is_that_of_the_layer(device, name):
    """Which may be filled in a graph and read outside of it, and is never used stale."""
    module, recipe = made(name, device), RECIPES["nvfp4"]
    x, run = values(32, 64, device=device), compiled(module)
    expected = step(module, module, recipe, x)
    assert_all_equal(step(module, run, recipe, x, True), expected)
    assert_all_equal(step(module, module, recipe, x, False), expected)
    assert_all_equal(step(module, run, recipe, x, False), expected)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    assert_all_equal(step(module, run, recipe, x, False), step(module, module, recipe, x))


def test_the_cached_weight_is_quantized_once(monkeypatch):
    module, recipe, x = made("Linear", "cpu"), RECIPES["nvfp4"], values(32, 64)
    run, filled = compiled(module), []
    fill = WeightCache._fill
    monkeypatch.setattr(WeightCache, "_fill", lambda self, *given: filled.append(1) or fill(self, *given))
    for first in (True, False, False):
        step(module, run, recipe, x, first)
    assert len(filled) == 1


def test_another_recipe_is_another_graph(device):
    module, x = made("Linear", device), values(32, 64, device=device)
    run = compiled(module)
    for recipe in (RECIPES["nvfp4"], RECIPES["mxfp8"], NVFP4Recipe(hadamard=False)):
        assert_all_equal(step(module, run, recipe, x), step(module, module, recipe, x))
    assert torch.equal(run(x), module(x))  # an ordinary layer, outside of autocast


def test_an_odd_number_of_rows_without_the_transform(device):
    """Python completes their columns."""
    module, recipe = made("Linear", device), RECIPES["nvfp4, no transform"]
    run = compiled(module)
    for rows in (17, 32, 7):
        x = values(rows, 64, device=device)
        assert_all_equal(step(module, run, recipe, x), step(module, module, recipe, x))


def test_other_recipes_for_some_modules(device):
    model = nn.Sequential(
        made("Linear", device), nn.ReLU(), Linear(48, 64, dtype=torch.bfloat16, device=device)
    )
    recipe = NVFP4Recipe(modules=[("2", RECIPES["mxfp8"])])
    x, run, around = values(32, 64, device=device), compiled(model), autocast(recipe, model)
    assert_all_equal(step(model, run, around, x), step(model, model, around, x))


def test_blocks_that_are_compiled_alone(device):
    """Blocks of equal recipes share a graph, those of others do not."""
    blocks = nn.ModuleList(made("no bias", device) for _ in range(4))
    recipe = NVFP4Recipe(modules=[("1", RECIPES["mxfp8"]), ("3", None)])
    x, runs = values(32, 64, device=device), [compiled(block) for block in blocks]
    with autocast(recipe, blocks), torch.no_grad():
        for i in (0, 1, 3, 2):
            stance = "fail_on_recompile" if i == 2 else "default"
            with torch.compiler.set_stance(stance):
                y = runs[i](x)
            assert_bytes_equal(y, blocks[i](x), f"block {i}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_compiled_code(device, reentrant):
    """It needs no context around the backward pass, and takes none that the forward pass had not."""
    module, x = made("LayerNormMLP", device), values(32, 64, device=device)
    run = partial(checkpoint, compiled(module), use_reentrant=reentrant, preserve_rng_state=False)
    for recipe in (RECIPES["nvfp4"], None, RECIPES["mxfp8"]):
        assert_all_equal(step(module, run, recipe, x), step(module, module, recipe, x))


def test_only_the_gradients_that_are_needed(device):
    module, recipe, x = made("Linear", device), RECIPES["nvfp4"], values(32, 64, device=device)
    run = compiled(module)
    with autocast(recipe), torch.no_grad():
        assert_bytes_equal(run(x), module(x), "inference")
    module.weight.requires_grad_(False)
    found, expected = (step(module, call, recipe, x) for call in (run, module))
    assert found.pop(2) is expected.pop(2) is None
    assert_all_equal(found, expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("flag", [False, True])
def test_main_grad(device, flag, name):
    """The gradient is added inside of the graph, unless a flag is to be set that says so."""
    module, x = made("Linear", device, fuse_wgrad_accumulation=True), values(32, 64, device=device)
    sums = []
    for function in (torch.compile(module, fullgraph=not flag, backend="aot_eager"), module):
        module.weight.main_grad = torch.ones(48, 64, device=device)
        if flag:
            module.weight.grad_added_to_main_grad = False
        for _ in range(2):
            step(module, function, RECIPES[name], x)
        assert not flag or module.weight.grad_added_to_main_grad
        assert flag or module.weight.grad is None
        sums.append(module.weight.main_grad)
    assert (sums[0] != 1).any()
    assert_bytes_equal(*sums, "main_grad")


@needs_gpu
def test_inductor():
    """What is around the layer may be compiled to other kernels; the layer is not. (On a CPU a C++ compiler
    would take a minute for it.)
    """
    device = torch.device("cuda")
    module, recipe, x = made("Linear", device), RECIPES["nvfp4"], values(32, 64, device=device)
    run = torch.compile(module, fullgraph=True, backend="inductor")
    assert_all_equal(step(module, run, recipe, x)[:3], step(module, module, recipe, x)[:3])


# Groups that are multiplied at once


def groups(device, **options):
    torch.manual_seed(0)
    return GroupedLinear(4, 64, 48, device=device, dtype=torch.bfloat16, **options)


@pytest.mark.usefixtures("multiplied_at_once")
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"primary_weights": True}], ids=str)
def test_groups_in_one_graph(device, options):
    """Splits that change are no other graph."""
    module, recipe, x = groups(device, **options), NVFP4Recipe(), values(36, 64, device=device)
    run = compiled(module)
    for splits in ([16, 0, 17, 3], [9, 9, 9, 9]):
        given = torch.tensor(splits, device=device)
        with torch.compiler.set_stance("fail_on_recompile" if splits[1] else "default"):
            actual = step(module, run, recipe, x, given)
        assert_all_equal(actual, step(module, module, recipe, x, given))
    splits = [16, 0, 17, 3]  # on the host
    assert_all_equal(step(module, run, recipe, x, splits), step(module, module, recipe, x, splits))


@pytest.mark.usefixtures("multiplied_at_once")
@pytest.mark.parametrize("options", [{}, {"primary_weights": True}], ids=str)
def test_the_cache_of_groups(device, options):
    module, recipe = groups(device, **options), NVFP4Recipe(stochastic_rounding=False)
    run, given = compiled(module), (values(36, 64, device=device), [16, 0, 17, 3])
    for first in (True, False):
        assert_all_equal(step(module, run, recipe, *given, first), step(module, module, recipe, *given))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(values(*parameter.shape, device=device, seed=4))
    assert_all_equal(step(module, run, recipe, *given, False), step(module, module, recipe, *given))


@pytest.mark.usefixtures("multiplied_at_once")
def test_groups_of_weights_in_blocks_of_1x16(device):
    module, given = groups(device), (values(36, 64, device=device), [16, 0, 17, 3])
    recipe = NVFP4Recipe(weight_block=(1, 16), stochastic_rounding=False)
    assert_all_equal(step(module, compiled(module), recipe, *given), step(module, module, recipe, *given))
