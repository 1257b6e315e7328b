"""convert_model of experts in one parameter [E, N, K]."""

import torch
from cases.ops import assert_record_equals
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4 import reference


class Experts(nn.Module):
    """As model libraries write them: one parameter for all experts, indexed or multiplied in one batch."""

    def __init__(self, device="cpu", dtype=torch.bfloat16):
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.up = nn.Parameter(
            0.1 * torch.randn(3, 48, 32, **options) * torch.tensor([1.0, 5.0, 0.2], **options).view(3, 1, 1)
        )
        self.down = nn.Parameter(0.1 * torch.randn(3, 32, 48, **options))
        self.odd = nn.Parameter(torch.randn(3, 5, 32, **options))
        self.deep = nn.Parameter(torch.randn(1, 3, 4, 32, **options))
        self.mixing = nn.Conv1d(32, 32, 2, **options)


def is_expert(module, name):
    return name.endswith(("up", "down", "odd", "deep", "mixing"))


def test_only_a_filter_takes_stacks():
    model = nn.ModuleDict({"mlp": Experts()})
    report = zerofp4.convert_model(model)
    assert report.converted == [] and "is no matrix" in report.skipped["mlp.up"]
    seen = []

    def choose(module, name):
        seen.append(name)
        return is_expert(module, name) and name != "mlp.down"

    report = zerofp4.convert_model(model, choose)
    assert seen == ["mlp.up", "mlp.down"] and report.converted == ["mlp.up"]
    assert report.skipped["mlp.down"] == "filter_fn is false for it"
    assert report.skipped["mlp.odd"] == "a weight of shape (3, 5, 32) does not have two even sizes"
    for name in ("mlp.deep", "mlp.mixing.weight"):
        assert "is no matrix" in report.skipped[name]
    total = sum(p.numel() for p in model.parameters())
    assert report.share == 3 * 48 * 32 / total


def test_converted_stacks(device):
    model = Experts(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert zerofp4.convert_model(model, is_expert).converted == ["up", "down"]
    for name in ("up", "down"):
        weight = model.get_parameter(name)
        assert isinstance(weight, nn.Parameter) and weight.record.name == name and weight.amax.shape == (3,)
        assert_record_equals(weight.record, reference.quantize_experts(before[name]), name)
        assert_bytes_equal(weight.get_high_precision_init_val(), before[name].cpu(), "initial value")
