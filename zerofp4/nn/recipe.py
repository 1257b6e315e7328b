"""Recipes: what the layers of zerofp4.nn quantize, and how; autocast says where."""

import contextlib
import dataclasses

from zerofp4.format import BLOCK, FourOverSix
from zerofp4.gemm import BACKENDS
from zerofp4.storage import check_block

BACKWARDS = ("quantized", "dequantized")


@dataclasses.dataclass(frozen=True)
class NVFP4Recipe:
    """All three products of a layer from NVFP4 operands: activations and gradients in blocks of 1x16.

    weight_block: (16, 16), whose columnwise copy is the transpose, or (1, 16), which needs high-precision
    parameters.
    stochastic_rounding: of gradients, with torch's default generator of their device.
    hadamard, random_signs: the transform of both operands of the weight's gradient, and whether with signs.
    four_over_six: how activations and high-precision weights choose their scales; gradients never do.
    backward: "quantized", or "dequantized": gradients stay in their dtype, and are multiplied with the values
    of the quantized weight and the quantized input.
    backend: of zerofp4.gemm.

    Raises TypeError or ValueError for another value, and for random_signs without hadamard.
    """

    weight_block: tuple[int, int] = (BLOCK, BLOCK)
    stochastic_rounding: bool = True
    hadamard: bool = True
    random_signs: bool = True
    four_over_six: FourOverSix | None = None
    backward: str = "quantized"
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_block(self.weight_block)
        object.__setattr__(self, "weight_block", tuple(self.weight_block))
        if not isinstance(self.four_over_six, FourOverSix | None):
            kind = type(self.four_over_six).__name__
            raise TypeError(f"four_over_six must be a FourOverSix or None, got {kind}")
        if self.hadamard is False and self.random_signs is False:
            raise ValueError("random_signs=False says how hadamard transforms, but hadamard is False")
        _check_products(self.backward, self.backend)


@dataclasses.dataclass(frozen=True)
class MXFP8Recipe:
    """All three products of a layer from MXFP8 operands, rounded to nearest. For high-precision parameters.

    backward, backend: as of NVFP4Recipe. Raises ValueError for another value.
    """

    backward: str = "quantized"
    backend: str = "auto"

    def __post_init__(self) -> None:
        _check_products(self.backward, self.backend)


Recipe = NVFP4Recipe | MXFP8Recipe


def _check_products(backward: str, backend: str) -> None:
    if backward not in BACKWARDS:
        raise ValueError(f"backward must be one of {BACKWARDS}, got {backward!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")


_current: list[Recipe] = []
"""Those of the contexts that are entered, which are all equal. Of the process: autograd runs what
torch.utils.checkpoint computes again in threads of its own.
"""


class autocast(contextlib.ContextDecorator):
    """Inside, the layers of zerofp4.nn compute by `recipe`; outside they are ordinary layers.

    Only the forward pass has to be inside. With torch.utils.checkpoint, which computes it once more, the
    backward pass too. It holds for all threads of the process.

    Raises TypeError for what is no recipe, RuntimeError inside an autocast with another recipe.
    """

    def __init__(self, recipe: Recipe):
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe must be an NVFP4Recipe or an MXFP8Recipe, got {type(recipe).__name__}")
        self.recipe = recipe

    def __enter__(self) -> "autocast":
        if _current and _current[-1] != self.recipe:
            raise RuntimeError(
                f"autocast({self.recipe}) is inside autocast({_current[-1]}): leave that first"
            )
        _current.append(self.recipe)
        return self

    def __exit__(self, *exception) -> None:
        _current.pop()


def current_recipe() -> Recipe | None:
    """That of the autocast around the caller; None outside."""
    return _current[-1] if _current else None
