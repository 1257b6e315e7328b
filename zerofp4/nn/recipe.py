"""Recipes: what the layers of zerofp4.nn quantize, and how; autocast says where."""

import contextlib
import dataclasses
import fnmatch
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from zerofp4.format import BLOCK, FourOverSix
from zerofp4.gemm import BACKENDS
from zerofp4.storage import check_block

BACKWARDS = ("quantized", "dequantized")
CACHES = ("operands", "dequantized")


@dataclasses.dataclass(frozen=True)
class NVFP4Recipe:
    """All three products of a layer from NVFP4 operands: activations and gradients in blocks of 1x16.

    weight_block: (16, 16), whose columnwise copy is the transpose, or (1, 16): of high-precision parameters,
    or of those that are NVFP4 in such blocks themselves, on FP4 tensor cores with a dequantized backward.
    stochastic_rounding: of gradients, with torch's default generator of their device.
    hadamard, random_signs: the transform of both operands of the weight's gradient, and whether with signs.
    four_over_six: how activations and high-precision weights choose their scales; gradients never do.
    backward: "quantized", or "dequantized": gradients stay in their dtype, and are multiplied with the values
    of the quantized weight and the quantized input.
    backend: of zerofp4.gemm.
    cache: what is kept of a weight from a call with is_first_microbatch=True on. "operands" is the quantized
    weight; "dequantized" besides, for the exact backend, its values as the products read them, which are then
    not made again for every product: 2 bytes an element, 4 where there is a quantized backward pass (twice as
    many on the CPU). The same bytes result; the native backend has no such values.
    modules: (name, recipe) of the modules that follow another recipe, or None and stay as they are outside of
    autocast, with all that is in them: names as of named_modules(), in which * stands for anything. The first
    that fits counts; autocast takes the model.

    Raises TypeError or ValueError for another value, and for random_signs without hadamard.
    """

    weight_block: tuple[int, int] = (BLOCK, BLOCK)
    stochastic_rounding: bool = True
    hadamard: bool = True
    random_signs: bool = True
    four_over_six: FourOverSix | None = None
    backward: str = "quantized"
    backend: str = "auto"
    cache: str = "operands"
    modules: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        check_block(self.weight_block)
        object.__setattr__(self, "weight_block", tuple(self.weight_block))
        if not isinstance(self.four_over_six, FourOverSix | None):
            kind = type(self.four_over_six).__name__
            raise TypeError(f"four_over_six must be a FourOverSix or None, got {kind}")
        if self.hadamard is False and self.random_signs is False:
            raise ValueError("random_signs=False says how hadamard transforms, but hadamard is False")
        _check_products(self.backward, self.backend, self.cache)
        object.__setattr__(self, "modules", _checked_modules(self.modules))
        object.__setattr__(self, "key", repr(self))


@dataclasses.dataclass(frozen=True)
class MXFP8Recipe:
    """All three products of a layer from MXFP8 operands, rounded to nearest. For high-precision parameters.

    backward, backend, cache, modules: as of NVFP4Recipe. Raises TypeError or ValueError for another value.
    """

    backward: str = "quantized"
    backend: str = "auto"
    cache: str = "operands"
    modules: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        _check_products(self.backward, self.backend, self.cache)
        object.__setattr__(self, "modules", _checked_modules(self.modules))
        object.__setattr__(self, "key", repr(self))


Recipe = NVFP4Recipe | MXFP8Recipe

_by_key: dict[str, Recipe] = {}
"""What autocast was entered with, for operators, which take a recipe as its key."""


def recipe_of_key(key: str) -> Recipe:
    return _by_key[key]


def _check_products(backward: str, backend: str, cache: str) -> None:
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {BACKWARDS}, got {backward!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if cache not in CACHES:
        raise ValueError(f"cache must be one of {CACHES}, got {cache!r}")


def _checked_modules(modules: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """As a tuple, which can be hashed."""
    for name, recipe in modules:
        if not isinstance(name, str) or not isinstance(recipe, Recipe | None):
            raise TypeError(f"modules must be pairs of a name and a recipe or None, got {(name, recipe)}")
        if recipe is not None and recipe.modules:
            raise ValueError(
                f"modules: the recipe of {name!r} names modules itself, which only the outer one may"
            )
    return tuple((name, recipe) for name, recipe in modules)


class autocast(contextlib.ContextDecorator):
    """Inside, the layers of zerofp4.nn compute by `recipe`; outside they are ordinary layers.

    model: where the recipe names others for some modules, the model whose modules they are, as they are when
    the autocast is made.

    Only the forward pass has to be inside. With torch.utils.checkpoint, which computes it once more, the
    backward pass too. It holds for all threads of the process.

    Raises TypeError for what is no recipe, ValueError for modules without a model and for a name of none,
    RuntimeError inside an autocast with another recipe.
    """

    def __init__(self, recipe: Recipe, model: nn.Module | None = None):
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe must be an NVFP4Recipe or an MXFP8Recipe, got {type(recipe).__name__}")
        self.recipe = recipe
        self._others = _recipes_of_layers(recipe, model) or None  # a weak dictionary counts in Python
        named = [other for _, other in recipe.modules if other is not None]
        _by_key.update((each.key, each) for each in (recipe, *named))

    def recipe_of(self, layer: nn.Module | None) -> Recipe | None:
        """The recipe of a layer, None of one that stays as it is; or that of all others."""
        return self._others.get(layer, self.recipe) if self._others and layer is not None else self.recipe

    def recipes_of(self, layers: Iterable[nn.Module]) -> set[Recipe | None]:
        """Those of several layers."""
        return set(map(self.recipe_of, layers)) if self._others else {self.recipe}

    def __enter__(self) -> "autocast":
        if _current and _current[-1].recipe != self.recipe:
            outer = _current[-1].recipe
            raise RuntimeError(f"autocast({self.recipe}) is inside autocast({outer}): leave that first")
        _current.append(self)
        return self

    def __exit__(self, *exception) -> None:
        _current.pop()


_current: list[autocast] = []
"""The contexts that are entered, all with the same recipe. Of the process: autograd runs what
torch.utils.checkpoint computes again in threads of its own.
"""


def current_recipe(layer: nn.Module | None = None) -> Recipe | None:
    """That of the autocast around the caller, for a layer; None outside, and of a layer that follows none."""
    return _current[-1].recipe_of(layer) if _current else None


def common_recipe(layers: Iterable[nn.Module]) -> Recipe | None:
    """That of all these layers; None where they have different ones, or none."""
    recipes = _current[-1].recipes_of(layers) if _current else {None}
    return recipes.pop() if len(recipes) == 1 else None


def _recipes_of_layers(recipe: Recipe, model: nn.Module | None) -> weakref.WeakKeyDictionary:
    """The layers that a recipe names another for. The first name that a layer, or a module that it is in, has
    counts.
    """
    found: weakref.WeakKeyDictionary[nn.Module, Recipe | None] = weakref.WeakKeyDictionary()
    if not recipe.modules:
        return found
    if model is None:
        raise ValueError(
            f"recipe names modules {[name for name, _ in recipe.modules]}: give autocast the model"
        )
    for pattern, other in recipe.modules:
        named = [module for name, module in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        layers = [
            layer for module in named for layer in module.modules() if hasattr(layer, "takes_nvfp4_weight")
        ]
        if not layers:
            raise ValueError(f"recipe names {pattern!r}, but no module of that name in the model has a layer")
        for layer in layers:
            found.setdefault(layer, other)
    return found
