"""Public docstrings: the first line says what it is, and an example runs as it stands."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch
from torch import nn

import zerofp4

PUBLIC = {name: getattr(zerofp4, name) for name in zerofp4.__all__}
PUBLIC |= {f"optim.{name}": getattr(zerofp4.optim, name) for name in zerofp4.optim.__all__}
PUBLIC = {
    name: value for name, value in PUBLIC.items() if inspect.isclass(value) or inspect.isfunction(value)
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_first_line_says_what_it_is(name):
    """In one sentence, which does not go on in the next line."""
    first, *others = inspect.getdoc(PUBLIC[name]).splitlines()
    assert first.endswith(".") and 20 < len(first) <= 110
    assert not others or others[0] == ""


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, tmp_path):
    """With a model, an optimizer of it, values and a folder that a reader has."""
    code = [each.source for each in doctest.DocTestParser().get_examples(inspect.getdoc(PUBLIC[name]))]
    assert code, "there is no example"
    if "save_safetensors" in "".join(code):
        pytest.importorskip("safetensors")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plain, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(64, 64)
    brought = {"torch": torch, "zerofp4": zerofp4, "model": model, "plain": plain, "x": x, "folder": tmp_path}
    if not any(call in "".join(code) for call in ("zerofp4.convert_model(", "Optimizer(")):
        zerofp4.convert_model(model)
        brought["optimizer"] = zerofp4.ZeroFP4Optimizer(model.named_parameters(), lr=1e-3)
    exec("".join(code), brought)
