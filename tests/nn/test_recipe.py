"""Recipes, and the context that says where they hold."""

import contextlib
import copy
import dataclasses
import pickle
import re
import threading
import weakref

import pytest
import torch
from helpers import assert_all_equal, collect_garbage
from tensor_helpers import values
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerofp4 import FourOverSix, convert_model
from zerofp4.nn import (
    GroupedLinear,
    LayerNormMLP,
    Linear,
    MXFP8Recipe,
    NVFP4Recipe,
    autocast,
    quantize_input,
)
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
            "modules must be pairs of a name and a recipe",
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


def test_a_context_belongs_to_its_thread():
    """Of two threads that are in contexts of their own, neither sees or ends the other's."""
    turns, seen = threading.Barrier(2, timeout=60), {"first": [], "second": []}

    def run(name, recipe, leaves_first):
        seen[name].append(current_recipe())
        with autocast(recipe):
            turns.wait()
            seen[name].append(current_recipe())
            if not leaves_first:
                turns.wait()
                seen[name].append(current_recipe())
        if leaves_first:
            turns.wait()
        seen[name].append(current_recipe())

    with autocast(NVFP4Recipe(hadamard=False)):
        arguments = (("first", NVFP4Recipe(), True), ("second", MXFP8Recipe(), False))
        threads = [threading.Thread(target=run, args=each) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_recipe() == NVFP4Recipe(hadamard=False)
    assert seen["first"] == [None, NVFP4Recipe(), None]
    assert seen["second"] == [None, MXFP8Recipe(), MXFP8Recipe(), None]


def test_it_ends_with_an_error_and_works_as_a_decorator():
    with autocast(NVFP4Recipe()):
        with pytest.raises(ZeroDivisionError), autocast(MXFP8Recipe()):
            raise ZeroDivisionError
        assert current_recipe() == NVFP4Recipe()
    assert current_recipe() is None
    assert autocast(MXFP8Recipe())(current_recipe)() == MXFP8Recipe()


@pytest.mark.parametrize("inner", ["teacher", "student"])
def test_the_innermost_context_whose_model_has_a_layer_decides(inner):
    """A teacher inside the student's context, and the other way round."""
    models = {"student": nn.ModuleDict(), "teacher": nn.ModuleDict()}
    for model in models.values():
        model.update({"body": Linear(32, 32), "lm_head": Linear(32, 32)})
    excludes = NVFP4Recipe(modules=[("lm_head", None)])
    contexts = {
        "student": autocast(excludes, models["student"]),
        "teacher": autocast(NVFP4Recipe(hadamard=False), models["teacher"]),
    }
    outer = "student" if inner == "teacher" else "teacher"
    for model in (models["teacher"], None):
        contexts["teacher"] = autocast(NVFP4Recipe(hadamard=False), model)
        with contexts[outer], contexts[inner]:
            takes_all = model is None and inner == "teacher"
            for layer, own in (("body", excludes), ("lm_head", None)):
                found = current_recipe(models["student"][layer])
                assert found == (NVFP4Recipe(hadamard=False) if takes_all else own)
                assert current_recipe(models["teacher"][layer]) == NVFP4Recipe(hadamard=False)


def test_a_copy_of_a_model_is_another_model():
    model = nn.Sequential(Linear(32, 32))
    recipe = NVFP4Recipe(modules=[("0", MXFP8Recipe())])
    context = autocast(recipe, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with context:
            assert current_recipe(other[0]) is None and current_recipe(model[0]) == MXFP8Recipe()


# Layers that a backward pass runs once more


def one_of(name, device):
    """A call of layers with an input [24, 64], and their parameters."""
    options = {"dtype": torch.bfloat16, "device": device}
    torch.manual_seed(0)
    if name == "LayerNormMLP":
        layer = LayerNormMLP(64, 48, **options)
        return layer, layer
    if name == "quantize_input":
        layers = nn.ModuleList(Linear(64, 64, **options) for _ in range(2))

        def shared(x):
            hidden = quantize_input(x)
            return layers[0](hidden) + layers[1](hidden)

        return shared, layers
    if name == "cached, dequantized":
        layer = Linear(64, 64, **options)
        return lambda x: layer(x, True), layer
    layer = GroupedLinear(2, 64, 64, **options)
    return lambda x: layer(x, [8, 16]), layer


def gradients(module, x, y, around=None):
    torch.manual_seed(7)
    with around or contextlib.nullcontext():
        y.backward(torch.linspace(-1, 2, y.numel(), device=x.device).view(y.shape).to(y.dtype))
    made = [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return made


@pytest.mark.parametrize("name", ["LayerNormMLP", "GroupedLinear", "quantize_input", "cached, dequantized"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_needs_no_context_around_the_backward_pass(device, name, reentrant):
    """Layers use the recipe of their last forward pass, or none, whatever is around the backward pass: on a
    GPU it runs in a thread of its own.
    """
    call, module = one_of(name, device)
    backward = "dequantized" if "dequantized" in name else "quantized"
    recipe, given = NVFP4Recipe(backend="exact", backward=backward), values(24, 64, device=device)
    for inside in (contextlib.nullcontext(), autocast(recipe)):
        x = given.clone().requires_grad_()
        with inside:
            y = call(x)
        expected = gradients(module, x, y)
        for around in (None, autocast(MXFP8Recipe()), autocast(recipe)):
            x = given.clone().requires_grad_()
            with inside:
                y = checkpoint(call, x, use_reentrant=reentrant, preserve_rng_state=False)
            assert_all_equal(gradients(module, x, y, around), expected)


def test_checkpoints_of_two_models_in_one_backward_pass(device):
    models = [nn.Sequential(Linear(64, 64, device=device)) for _ in range(2)]
    recipes = [NVFP4Recipe(backend="exact", stochastic_rounding=False), MXFP8Recipe(backend="exact")]

    def run(how):
        inputs = [values(24, 64, device=device, dtype=torch.float32).requires_grad_() for _ in models]
        outputs = []
        for model, recipe, x in zip(models, recipes, inputs, strict=True):
            with autocast(recipe, model):
                outputs.append(how(model, x))
        sum(y.square().sum() for y in outputs).backward()
        return [x.grad for x in inputs]

    made = run(lambda model, x: checkpoint(model, x, use_reentrant=False))
    assert_all_equal(made, run(lambda model, x: model(x)), "a gradient")


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


def test_a_model_without_layers_raises():
    model = nn.Sequential(nn.Linear(32, 32))
    convert_model(model)
    with pytest.raises(ValueError, match=r"convert_model\(model, layers=True\)"):
        autocast(NVFP4Recipe(), model)


def test_layers_do_not_live_for_the_sake_of_a_context():
    model = nn.Sequential(Linear(32, 32))
    context, layer = autocast(NVFP4Recipe(modules=[("0", MXFP8Recipe())]), model), weakref.ref(model[0])
    del model
    collect_garbage()
    assert layer() is None and context.recipe.modules
