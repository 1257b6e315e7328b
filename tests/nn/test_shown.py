"""What print() shows of converted models and of reports."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

from torch import nn

import zerofp4
from zerofp4.nn import GroupedLinear, Linear


def test_converted_weights_show_their_format():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16, bias=False), nn.Linear(5, 3))
    zerofp4.convert_model(model, lambda module, name: name != "1", block=(16, 16))
    zerofp4.convert_model(model, lambda module, name: name == "1", block=(1, 16), layers=True)
    expected = [
        "Linear(in_features=32, out_features=32, bias=True, weight=NVFP4(16x16))",
        "Linear(in_features=32, out_features=16, bias=False, weight=NVFP4(1x16))",
        "Linear(in_features=5, out_features=3, bias=True)",
    ]
    lines = repr(model).splitlines()[1:-1]
    assert [line.partition(": ")[2] for line in lines] == expected
    assert [repr(layer) for layer in copy.deepcopy(model)] == expected
    assert [repr(layer) for layer in pickle.loads(pickle.dumps(model))] == expected
    zerofp4.unconvert_model(model)
    assert "NVFP4" not in repr(model)


def test_layers_of_our_own_show_their_format():
    assert repr(Linear(32, 16, primary_weights=True)).endswith("bias=True, weight=NVFP4(16x16))")
    sizes = "num_gemms=2, in_features=32, out_features=16, bias=False"
    for shown, primary in ((sizes, False), (f"{sizes}, weight=NVFP4(16x16)", True)):
        layer = GroupedLinear(2, 32, 16, bias=False, primary_weights=primary)
        assert repr(layer) == f"GroupedLinear({shown})"


def test_a_converted_model_is_freed_at_once():
    """A method of a module's own would be a reference cycle."""
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(32, 32))
        zerofp4.convert_model(model)
        layer = weakref.ref(model[0])
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_reports_are_tables_at_a_prompt():
    model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(4, 32)).bfloat16()
    report = zerofp4.convert_model(model)
    assert repr(report) == str(report)
    first, *others = repr(report).splitlines()
    assert first == "1 of 2 matrices are in NVFP4, 86.5% of the model's parameters"
    assert any("left out" in line and "1.weight: Embedding" in line for line in others)
    errors = zerofp4.quantization_error(model)
    assert repr(errors) == str(errors) and repr(errors).splitlines()[1].startswith("0")


def test_dir_has_the_public_names():
    assert set(dir(zerofp4)) == {*zerofp4.__all__, "integrations", "testing"}
    assert all(hasattr(zerofp4, name) for name in dir(zerofp4))
    assert {"ZeroFP4Optimizer", "convert_model"} <= set(dir(zerofp4))
