"""fuse_wgrad_accumulation where layers compute by no recipe: their gradients are in main_grad there, too."""

import copy

import pytest
import torch
from cases.layers import step
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn

from zerofp4.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, NVFP4Recipe, autocast

LAYERS = {
    "Linear": lambda **options: Linear(64, 48, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(64, 48, **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(64, 48, **options),
    "GroupedLinear": lambda **options: GroupedLinear(2, 64, 48, **options),
}


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    layers = [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
    return [layer.weight for layer in layers]


def gradient_of_x(model, call, *arguments, around=None):
    x = values(24, 64, device=next(model.parameters()).device)
    return step(model, call, around, x, *arguments)[1]


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_a_recipe(device, name, primary, excluded):
    """Outside of autocast, and where the recipe excludes them: twice what autograd would have given."""
    options = {"dtype": torch.bfloat16, "device": device, "primary_weights": primary}
    model = nn.ModuleDict({"layer": LAYERS[name](fuse_wgrad_accumulation=True, **options)})
    around = autocast(NVFP4Recipe(modules=[("layer", None)]), model) if excluded else None
    plain = copy.deepcopy(model["layer"])
    for module in plain.modules():
        module.fuse_wgrad_accumulation = False
    arguments = ([8, 16],) if isinstance(plain, GroupedLinear) else ()
    expected = gradient_of_x(plain, plain, *arguments)
    weights = weights_of(model)
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, device=device)
    for _ in range(2):
        found = gradient_of_x(model, model["layer"], *arguments, around=around)
        assert_bytes_equal(found, expected, "gradient of x")
    given = dict(plain.named_parameters())
    for key, parameter in model["layer"].named_parameters():
        if any(parameter is weight for weight in weights):
            assert parameter.grad is None
            assert_bytes_equal(parameter.main_grad, 2 * given[key].grad.float(), key)
        else:
            assert parameter.grad is not None


def test_the_flag_and_a_missing_buffer():
    layer = Linear(64, 48, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"weight\.main_grad, which is not there"):
        gradient_of_x(layer, layer)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(48, 64), False
    gradient_of_x(layer, layer)
    assert layer.weight.grad_added_to_main_grad is True
    assert not layer.weight.grad.any() and layer.weight.main_grad.any()
    with torch.no_grad():
        layer(values(24, 64))


@pytest.mark.heavy
@pytest.mark.usefixtures("fresh_compiler", "multiplied_at_once")
@pytest.mark.parametrize("recipe", [None, NVFP4Recipe(stochastic_rounding=False)], ids=["none", "nvfp4"])
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("name", ["Linear", "GroupedLinear"])
def test_compiled_layers(device, name, primary, recipe):
    """Without a recipe the addition breaks the graph."""
    options = {"dtype": torch.bfloat16, "device": device, "primary_weights": primary}
    layer = LAYERS[name](fuse_wgrad_accumulation=True, **options)
    arguments = ([8, 16],) if isinstance(layer, GroupedLinear) else ()
    found = []
    for call in (torch.compile(layer, backend="aot_eager"), layer):
        for weight in weights_of(layer):
            weight.main_grad = torch.zeros(weight.shape, device=device)
        made = gradient_of_x(layer, call, *arguments, around=recipe)
        found.append([made, *(weight.main_grad for weight in weights_of(layer))])
    assert_all_equal(*found, "a gradient")
