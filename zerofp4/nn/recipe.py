"""Recipes: what the layers of zerofp4.nn quantize, and how. autocast says where."""

import contextlib
import contextvars
import dataclasses
import fnmatch
import itertools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerofp4.format import BLOCK, FourOverSix
from zerofp4.gemm import BACKENDS
from zerofp4.storage import check_block, check_rounding, check_transform

BACKWARDS = ("quantized", "dequantized")


@dataclasses.dataclass(frozen=True)
class NVFP4Recipe:
    """All three products of a layer take NVFP4 operands: activations and gradients in blocks of 1x16.

    weight_block: (16, 16), whose columnwise copy is the transpose, or (1, 16). NVFP4 weights in (1, 16) need
        backward="dequantized" on FP4 tensor cores.
    stochastic_rounding: of gradients, with torch's default generator of their device.
    hadamard, random_signs: transform both operands of the weight's gradient, and with signs or without.
    four_over_six: how activations and high-precision weights choose their scales; gradients never do.
    backward: "quantized"; "dequantized" multiplies unquantized gradients with the values of the weight and
        input.
    backend: of zerofp4.gemm.
    modules: pairs (name, recipe). The named module, and all in it, follow that recipe, or with None compute
        as outside of autocast. Names are those of named_modules(); * matches anything; the first match
        counts. autocast needs the model then.

    Raises TypeError or ValueError for another value, and for random_signs without hadamard.
    """

    weight_block: tuple[int, int] = (BLOCK, BLOCK)
    stochastic_rounding: bool = True
    hadamard: bool = True
    random_signs: bool = True
    four_over_six: FourOverSix | None = None
    backward: str = "quantized"
    backend: str = "auto"
    modules: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        check_block(self.weight_block)
        object.__setattr__(self, "weight_block", tuple(self.weight_block))
        check_rounding(False, self.four_over_six)
        check_transform(1, True, self.hadamard, self.random_signs)
        _finish(self)


@dataclasses.dataclass(frozen=True)
class MXFP8Recipe:
    """All three products of a layer take MXFP8 operands, rounded to nearest. For high-precision parameters.

    backward, backend, modules: as of NVFP4Recipe. Raises TypeError or ValueError for another value.
    """

    backward: str = "quantized"
    backend: str = "auto"
    modules: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        _finish(self)


Recipe = NVFP4Recipe | MXFP8Recipe

_by_key: dict[str, Recipe] = {}
"""Recipes of autocasts. Operators take a recipe as its key."""


def recipe_of_key(key: str) -> Recipe:
    """Raises RuntimeError if no autocast has had the recipe, which an exported program may ask for."""
    if key not in _by_key:
        raise RuntimeError(f"make zerofp4.nn.autocast(recipe) first, of the recipe that is called for: {key}")
    return _by_key[key]


def _finish(recipe: Recipe) -> None:
    """Check what all recipes have, and give the new one its key."""
    for name, known in (("backward", BACKWARDS), ("backend", BACKENDS)):
        if getattr(recipe, name) not in known:
            raise ValueError(f"{name} must be one of {known}, got {getattr(recipe, name)!r}")
    for name, other in recipe.modules:
        if not isinstance(name, str) or not isinstance(other, Recipe | None):
            raise TypeError(f"modules must be pairs of a name and a recipe or None, got {(name, other)}")
        if other is not None and other.modules:
            raise ValueError(
                f"modules: the recipe of {name!r} names modules itself, which only the outer one may"
            )
    object.__setattr__(recipe, "modules", tuple((name, other) for name, other in recipe.modules))
    object.__setattr__(recipe, "key", repr(recipe))


class _Recipes(dict[str, Recipe | None]):
    """The recipes of a module, by the mark of the model's autocast. The module keeps them, as torch.compile
    guards on a layer's attributes, not on look-ups elsewhere. Copies belong to no model yet.
    """

    def __reduce__(self) -> tuple[type, tuple]:
        return _Recipes, ()


_NO_RECIPES = _Recipes()
_count = itertools.count()
_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Of models that autocast was given."""


class autocast(contextlib.ContextDecorator):
    """Inside, the layers of zerofp4.nn compute by `recipe`; outside they are ordinary layers.

    model: whose present modules compute by it; None for all layers. Needed if the recipe names modules.

    An autocast belongs to the thread that enters it, and the innermost one that has a layer decides about it.
    Only the forward pass has to be inside. In a backward pass, torch.utils.checkpoint runs a layer by the
    recipe of its last forward pass, and compiled code by the contexts of the last compiled forward pass.

    Raises TypeError for another recipe, ValueError for modules without a model, for a name that none has, and
    for a model without layers of zerofp4.nn.
    """

    def __init__(self, recipe: Recipe, model: nn.Module | None = None):
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe must be an NVFP4Recipe or an MXFP8Recipe, got {type(recipe).__name__}")
        self.recipe = recipe
        self.mark = None if model is None else f"{_numbers.setdefault(model, next(_count))} {recipe.key}"
        for module, own in _recipes_of_modules(recipe, model).items():
            vars(module).setdefault("_autocast_recipes", _Recipes())[self.mark] = own
        named = [other for _, other in recipe.modules if other is not None]
        _by_key.update((each.key, each) for each in (recipe, *named))

    def __enter__(self) -> "autocast":
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *exception) -> None:
        _entered.set(_entered.get()[:-1])


Contexts = tuple[autocast, ...]
"""The innermost last."""

_entered: contextvars.ContextVar[Contexts] = contextvars.ContextVar("zerofp4.nn.autocast", default=())
_last: weakref.WeakKeyDictionary[nn.Module, Recipe | None] = weakref.WeakKeyDictionary()
"""By layer the recipe of its last forward pass outside of compiled code."""
_last_compiled: Contexts = ()
"""The contexts of the last forward pass of compiled code, of any thread."""
_NO_LAYER = nn.Module()
_NO_BACKWARD_PASS = -1
"""What torch calls the backward pass of a thread in which none runs."""
_this_module = sys.modules[__name__]


def __getattr__(name: str) -> Contexts:
    """`contexts`: those that compiled code follows. torch.compile cannot trace a context variable, nor guard
    on a running backward pass, but compares what it has read of a module before each call.
    """
    global _last_compiled
    if name != "contexts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if torch._C._current_graph_task_id() == _NO_BACKWARD_PASS:
        _last_compiled = _entered.get()
    return _last_compiled


def current_recipe(layer: nn.Module | None = None) -> Recipe | None:
    """A layer's recipe by the innermost autocast, or None; in a backward pass that of its last forward."""
    if torch.compiler.is_compiling():
        return _recipe_in(_this_module.contexts, layer)
    key = _NO_LAYER if layer is None else layer
    if torch._C._current_graph_task_id() == _NO_BACKWARD_PASS:
        _last[key] = recipe = _recipe_in(_entered.get(), layer)
        return recipe
    return _last[key] if key in _last else _recipe_in(_last_compiled, layer)


def _recipe_in(contexts: Contexts, layer: nn.Module | None) -> Recipe | None:
    for context in reversed(contexts):
        if layer is None or context.mark is None:
            return context.recipe
        recipes = getattr(layer, "_autocast_recipes", _NO_RECIPES)
        if context.mark in recipes:
            return recipes[context.mark]
    return None


def _recipes_of_modules(recipe: Recipe, model: nn.Module | None) -> dict[nn.Module, Recipe | None]:
    """The recipe of each module that may be a layer: the first name that it, or a module around it, has."""
    if model is None and not recipe.modules:
        return {}
    if model is None:
        raise ValueError(
            f"recipe names modules {[name for name, _ in recipe.modules]}: give autocast the model"
        )
    if not any(hasattr(module, "takes_nvfp4_weight") for module in model.modules()):
        raise ValueError("model has no layer of zerofp4.nn: convert_model(model, layers=True) makes them")
    found: dict[nn.Module, Recipe | None] = {}
    for pattern, other in recipe.modules:
        named = [module for name, module in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        layers = [
            layer for module in named for layer in module.modules() if hasattr(layer, "takes_nvfp4_weight")
        ]
        if not layers:
            raise ValueError(f"recipe names {pattern!r}, but no module of that name in the model has a layer")
        for layer in layers:
            found.setdefault(layer, other)
    for module in model.modules():
        if module._parameters:
            found.setdefault(module, recipe)
    return found
