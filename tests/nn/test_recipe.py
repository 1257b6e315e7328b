"""Recipes, and the context that says where they hold."""

import dataclasses
import re
import threading
import weakref

import pytest
import torch
from helpers import collect_garbage
from torch import nn

from zerofp4 import FourOverSix
from zerofp4.nn import LayerNormMLP, Linear, MXFP8Recipe, NVFP4Recipe, autocast, quantize_input
from zerofp4.nn.recipe import current_recipe, recipe_of_key


def test_recipes_are_values():
    assert NVFP4Recipe() == NVFP4Recipe(weight_block=[16, 16]) and hash(NVFP4Recipe()) == hash(NVFP4Recipe())
    assert NVFP4Recipe() != NVFP4Recipe(hadamard=False) and MXFP8Recipe() != NVFP4Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVFP4Recipe().hadamard = False
    assert dataclasses.replace(NVFP4Recipe(), four_over_six=FourOverSix()).stochastic_rounding


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NVFP4Recipe(weight_block=(16, 1)), ValueError, r"block must be \(16, 16\) or \(1, 16\)"),
        (lambda: NVFP4Recipe(four_over_six=256), TypeError, "four_over_six must be a FourOverSix or None"),
        (lambda: NVFP4Recipe(hadamard=False, random_signs=False), ValueError, "but hadamard is False"),
        (lambda: NVFP4Recipe(backward="bf16"), ValueError, "backward must be one of .* got 'bf16'"),
        (lambda: MXFP8Recipe(backend="cutlass"), ValueError, "backend must be one of .* got 'cutlass'"),
        (
            lambda: NVFP4Recipe(modules=[("a", "bf16")]),
            TypeError,
            "modules must be pairs of a name and a recipe or None",
        ),
        (
            lambda: NVFP4Recipe(modules=[("a", NVFP4Recipe(modules=[("b", MXFP8Recipe())]))]),
            ValueError,
            "the recipe of 'a' names modules itself",
        ),
        (lambda: autocast(None), TypeError, "recipe must be an NVFP4Recipe or an MXFP8Recipe, got NoneType"),
    ],
)
def test_bad_recipes(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_context_holds_inside_and_in_all_threads():
    seen = []
    with autocast(NVFP4Recipe()):
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
    assert seen == [NVFP4Recipe()] and current_recipe() is None


def test_it_ends_with_an_error_and_works_as_a_decorator():
    with pytest.raises(ZeroDivisionError), autocast(MXFP8Recipe()):
        raise ZeroDivisionError
    assert current_recipe() is None
    assert autocast(MXFP8Recipe())(current_recipe)() == MXFP8Recipe()


def test_one_inside_another():
    with autocast(NVFP4Recipe()), autocast(NVFP4Recipe()):
        assert current_recipe() == NVFP4Recipe()
    with autocast(NVFP4Recipe()):
        with pytest.raises(
            RuntimeError, match=r"autocast\(MXFP8Recipe\(.*\) is inside autocast\(NVFP4Recipe"
        ):
            autocast(MXFP8Recipe()).__enter__()
        assert current_recipe() == NVFP4Recipe()
    assert current_recipe() is None


# Other recipes for some modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({name: Linear(32, 32, bias=False) for name in ("qkv", "out")})
        self.mlp = LayerNormMLP(32, 64)

    def forward(self, x):
        return self.mlp(self.attention["out"](self.attention["qkv"](x)))


def test_modules_follow_the_recipe_that_names_them():
    model = nn.Sequential(Block(), Block())
    recipe = NVFP4Recipe(modules=[("*.attention.out", NVFP4Recipe()), ("*.attention", MXFP8Recipe())])
    with autocast(recipe, model):
        for block in model:
            assert current_recipe(block.attention["qkv"]) == MXFP8Recipe()
            assert current_recipe(block.attention["out"]) == NVFP4Recipe()  # the first name counts
            assert current_recipe(block.mlp.fc1) == current_recipe() == recipe
        x = torch.randn(16, 32)
        mixed = model[0](x)
    hidden = x
    for layer, own in (
        (model[0].attention["qkv"], MXFP8Recipe()),
        (model[0].attention["out"], NVFP4Recipe()),
    ):
        with autocast(own):
            hidden = layer(hidden)
    with autocast(NVFP4Recipe()):
        assert torch.equal(mixed, model[0].mlp(hidden))


def test_modules_that_follow_no_recipe_are_as_outside_of_autocast():
    model, x = nn.Sequential(Block(), Block()), torch.randn(16, 32)
    recipe = NVFP4Recipe(stochastic_rounding=False, modules=[("0", None), ("*.mlp.fc2", None)])
    plain = model[0](x)
    with autocast(recipe, model):
        assert current_recipe(model[0].attention["qkv"]) is current_recipe(model[1].mlp.fc2) is None
        assert current_recipe(model[1].mlp.fc1) == recipe and recipe_of_key(recipe.key) == recipe
        assert torch.equal(model[0](x), plain)
        mixed, shared = model[1](plain), quantize_input(plain)
        assert quantize_input(plain, model[0].attention["qkv"]) is plain
        with pytest.raises(ValueError, match="x is quantized, but the layer follows no recipe"):
            model[0].attention["qkv"](shared)
    with autocast(NVFP4Recipe(stochastic_rounding=False)):
        attention = model[1].attention["out"](model[1].attention["qkv"](plain))
        assert not torch.equal(model[1].mlp(attention), mixed)
    assert not torch.equal(model[1](plain), mixed)


def test_a_name_of_nothing_raises():
    model = nn.Sequential(Block(), nn.GELU())
    for name in ("attention", "1", "*.nowhere"):
        with pytest.raises(
            ValueError, match=f"recipe names {re.escape(repr(name))}, but no module of that name"
        ):
            autocast(NVFP4Recipe(modules=[(name, MXFP8Recipe())]), model)
    with pytest.raises(ValueError, match=r"recipe names modules \['0'\]: give autocast the model"):
        autocast(NVFP4Recipe(modules=[("0", MXFP8Recipe())]))


def test_layers_do_not_live_for_the_sake_of_a_context():
    model = nn.Sequential(Linear(32, 32))
    context, layer = autocast(NVFP4Recipe(modules=[("0", MXFP8Recipe())]), model), weakref.ref(model[0])
    del model
    collect_garbage()
    assert layer() is None and context.recipe_of(None) == context.recipe
