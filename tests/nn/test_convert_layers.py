"""convert_model(layers=True): modules that become layers; columnwise=False: primary weights of rows only."""

import pytest
import torch
from cases.layers import RECIPES, step
from helpers import assert_all_equal
from tensor_helpers import values
from torch import nn

import zerofp4
from zerofp4 import NVFP4Tensor, ops
from zerofp4.nn import Linear


class Subclass(nn.Linear):
    """Computes what nn.Linear computes, and may have more."""


def model(device="cpu"):
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    return nn.Sequential(
        nn.LayerNorm(64, **options),
        nn.Linear(64, 48, **options),
        nn.GELU(),
        Subclass(48, 64, **options),
        nn.Linear(64, 33, **options),
    )


def test_modules_stay_where_they_are_and_compute_by_the_recipe(device):
    module = model(device)
    kept, calls = module[1], []
    kept.register_forward_hook(lambda *given: calls.append(1))
    keys = list(module.state_dict())
    report = zerofp4.convert_model(module, layers=True)
    assert (report.converted, report.layers) == (["1", "3"], ["1"])
    assert module[1] is kept and type(kept) is Linear
    assert [type(each) for each in module[3:]] == [Subclass, nn.Linear]
    assert list(module.state_dict()) == keys
    alone = Linear(64, 48, dtype=torch.bfloat16, device=device)
    alone.weight, alone.bias = kept.weight, kept.bias
    x = values(32, 64, device=device)
    assert_all_equal(
        step(kept, kept, RECIPES["nvfp4"], x), step(alone, alone, RECIPES["nvfp4"], x), "the layer"
    )
    assert calls == [1]


def test_without_layers_the_modules_are_what_they_were():
    module = model()
    assert zerofp4.convert_model(module).layers == []
    assert type(module[1]) is nn.Linear


def test_filter_fn_chooses_the_layers_too():
    module = model()
    report = zerofp4.convert_model(module, lambda each, name: name == "3", layers=True)
    assert (report.converted, report.layers) == (["3"], [])
    assert type(module[1]) is nn.Linear and not isinstance(module[1].weight, NVFP4Tensor)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4, dequantized"])
def test_rows_alone_give_the_bytes_of_both_copies(device, name):
    results = []
    for columnwise in (True, False):
        module = model(device)
        zerofp4.convert_model(module, layers=True, columnwise=columnwise)
        assert (module[1].weight.columnwise_data is None) == (not columnwise)
        results.append(step(module, module, RECIPES[name], values(32, 64, device=device)))
    assert_all_equal(*results)


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("has_tensor_cores", [True, False])
def test_columns_are_kept_where_something_reads_them(monkeypatch, has_tensor_cores, layers):
    """Where there are FP4 tensor cores, by layers of ours; the exact backend reads rows."""
    monkeypatch.setattr(ops, "has_fp4_tensor_cores", lambda device: has_tensor_cores)
    module = nn.Sequential(*model(), zerofp4.nn.Linear(64, 64, dtype=torch.bfloat16))
    zerofp4.convert_model(module, layers=layers)
    kept = [part.weight.columnwise_data is not None for part in (module[1], module[-1])]
    assert kept == [has_tensor_cores and layers, has_tensor_cores]
    rows = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    zerofp4.convert_model(rows, layers=True, block=(1, 16))
    assert rows[0].weight.columnwise_data is None


def test_rows_alone_take_half_a_byte():
    module = nn.Sequential(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16))
    zerofp4.convert_model(module, block=(16, 16))
    assert module[0].weight.nbytes <= 0.51 * 512 * 512
