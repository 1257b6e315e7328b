"""Recipes, and the context that says where they hold."""

import dataclasses
import threading

import pytest

from zerofp4 import FourOverSix
from zerofp4.nn import MXFP8Recipe, NVFP4Recipe, autocast
from zerofp4.nn.recipe import current_recipe


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
