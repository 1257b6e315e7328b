"""The assertion that leaves out what hardware may choose must itself fail when it should."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from helpers import assert_values_equal


def test_only_the_bits_of_nan_do_not_count_as_values():
    nan = float("nan")
    assert_values_equal(torch.tensor([0.0, nan]), torch.tensor([0.0, -nan]), "NaN")
    with pytest.raises(AssertionError, match="zero: 1 of 2 elements"):
        assert_values_equal(torch.tensor([0.0, nan]), torch.tensor([-0.0, -nan]), "zero")
    with pytest.raises(AssertionError, match="one NaN: 1 of 2 elements"):
        assert_values_equal(torch.tensor([0.0, nan]), torch.tensor([0.0, 1.0]), "one NaN")


def test_pytest_looks_into_every_folder_of_tests(pytestconfig):
    """By default it leaves out folders called build or dist."""
    patterns = pytestconfig.getini("norecursedirs")
    folders = {file.parent for file in Path(__file__).parent.rglob("test_*.py")}
    assert not [folder for folder in folders for p in patterns if fnmatch(folder.name, p)]
