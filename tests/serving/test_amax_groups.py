"""Which weights of an architecture share one amax."""

from __future__ import annotations

import pytest
import torch
from cases.serving import ARCHITECTURES, UNFUSED, make_plain, takes, trained
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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_optimizer_takes_them(name):
    model, _ = trained(name)
    for group in serving.amax_groups(model):
        assert len({member.amax.item() for member in group}) == 1
    weights = [p for p in model.parameters() if isinstance(p, zerofp4.NVFP4Tensor) and p.dim() == 2]
    assert len({weight.amax.item() for weight in weights}) > len(GROUPS[name])


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
