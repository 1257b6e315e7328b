"""Which weights of an architecture share one amax."""

from __future__ import annotations

import pytest
import torch
from cases.serving import ARCHITECTURES, UNFUSED, make_plain, takes
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import serving

LAYERS = 2
ATTENTION = ("q_proj", "k_proj", "v_proj")
GROUPS = {
    **dict.fromkeys(("Llama", "Qwen3", "Mistral", "Gemma2"), [ATTENTION, ("gate_proj", "up_proj")] * LAYERS),
    **dict.fromkeys(("Qwen3Moe", "Mixtral"), [ATTENTION] * LAYERS),
    "DeepseekV3": [("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")] * LAYERS,
}
"""Last names of modules. The second layer of DeepSeek has experts, and gate and up of shared ones."""


def names_of(model: nn.Module, groups: list[list[torch.Tensor]]) -> list[list[str]]:
    names = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    return [[names[id(member)] for member in group] for group in groups]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_groups_of_an_architecture(name):
    model = make_plain(name)
    before = names_of(model, serving.amax_groups(model, takes))
    zerofp4.convert_model(model, takes)
    groups = names_of(model, serving.amax_groups(model))
    assert groups == before  # prepare of FSDP2 takes them before the conversion
    assert [tuple(member.rpartition(".")[2] for member in group) for group in groups] == GROUPS[name]
    for group in groups:
        assert len({member.rpartition(".")[0] for member in group}) == 1, group
    single = {n.removesuffix(".weight") for n, p in model.named_parameters() if hasattr(p, "record")}
    single -= {member for group in groups for member in group}
    assert all(n.endswith((*UNFUSED, "gate_up_proj")) for n in single)


@pytest.mark.parametrize(
    "kind", [{"block": (16, 16)}, {"block": (1, 16), "four_over_six": zerofp4.FourOverSix()}], ids=str
)
@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_a_model_is_converted_with_them(name, kind):
    """From the first moment, and by the first cast of an optimizer, which changes nothing else."""
    model = make_plain(name)
    plain = dict(model.named_parameters())
    zerofp4.convert_model(model, takes, amax_groups=serving.amax_groups(model, takes), **kind)
    groups = serving.amax_groups(model)
    shared = {}
    for group in groups:
        amax = torch.stack([plain[member.record.name + ".weight"].abs().amax() for member in group]).amax()
        shared |= dict.fromkeys(map(id, group), amax.float().view(1))
    weights = [p for p in model.parameters() if isinstance(p, zerofp4.NVFP4Tensor) and p.dim() == 2]
    before = [(w.rowwise_data.clone(), w.rowwise_scale.clone(), w.amax.clone()) for w in weights]
    for weight in weights:
        values = plain[weight.record.name + ".weight"]
        expected = zerofp4.quantize(values, amax=shared.get(id(weight)), **kind)
        assert_bytes_equal(weight.rowwise_data, expected.rowwise_data, f"{weight.record.name}: codes")
        assert_bytes_equal(weight.rowwise_scale, expected.rowwise_scale, f"{weight.record.name}: scales")
        assert_bytes_equal(weight.amax, expected.amax, f"{weight.record.name}: amax")
    zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), lr=0.1, amax_groups=groups)
    for weight, buffers in zip(weights, before, strict=True):
        for now, then in zip((weight.rowwise_data, weight.rowwise_scale, weight.amax), buffers, strict=True):
            assert_bytes_equal(now, then, weight.record.name)


def test_groups_of_stacks_are_converted_expert_by_expert():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Parameter(torch.randn(3, 16, 32)) for _ in range(2))

    model = Experts()
    gate, up = model.gate, model.up
    zerofp4.convert_model(model, lambda *_: True, amax_groups=[[gate, up]])
    expected = torch.maximum(gate.abs().amax((1, 2)), up.abs().amax((1, 2)))
    assert_bytes_equal(model.gate.amax, expected, "amax")
    assert_bytes_equal(model.up.amax, expected, "amax")


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (lambda a, b: a.weight, TypeError, "amax_groups must be a list of lists of weights, got Parameter"),
        (lambda a, b: [[a.weight, a.bias]], ValueError, r"amax_groups\[0\] has a member that is not one of"),
        (lambda a, b: [[a.weight], [b.weight, a.weight]], ValueError, r"amax_groups\[1\]: '0' is in an amax"),
    ],
)
def test_groups_of_other_weights_are_refused(groups, error, message):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.raises(error, match=message):
        zerofp4.convert_model(model, amax_groups=groups(*model))
    assert type(model[0].weight) is type(model[1].weight) is nn.Parameter


def test_only_converted_weights_are_in_a_group():
    model = make_plain("Llama")
    zerofp4.convert_model(model, lambda module, name: takes(module, name) and "v_proj" not in name)
    first = names_of(model, serving.amax_groups(model))[0]
    assert [name.rpartition(".")[2] for name in first] == ["q_proj", "k_proj"]


def test_a_user_adds_an_architecture():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wkv, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(3))

    model = nn.Sequential(Attention(), Attention())
    assert serving.amax_groups(model) == []
    serving.FUSED.append(("wq", "wkv"))
    try:
        assert names_of(model, serving.amax_groups(model)) == [["0.wq", "0.wkv"], ["1.wq", "1.wkv"]]
    finally:
        serving.FUSED.pop()
