"""Which modules get plain values, and which the codes, in a world of one; what FSDP2 holds of both."""

from __future__ import annotations

import pytest
import torch
from cases.fsdp2 import BF16, Experts
from helpers import assert_bytes_equal
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerofp4
from zerofp4.integrations import fsdp2


class TakesCodes(nn.Linear):
    """A layer that says that it multiplies an NVFP4Tensor."""

    takes_nvfp4_weight = True


class Seen(nn.Module):
    """Layers that note what their forward pass computed with."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(32, 48)
        self.codes = TakesCodes(48, 32)
        self.experts = Experts()
        self.own = nn.Linear(32, 34, bias=False)  # the outermost module's
        self.seen: dict[str, bool] = {}
        for name, module in self.named_children():
            module.register_forward_pre_hook(lambda module, args, name=name: self.note(name, module))

    def note(self, name: str, module: nn.Module) -> None:
        weight = next(module.parameters())
        assert isinstance(weight, zerofp4.NVFP4Tensor) or type(weight) is nn.Parameter
        self.seen[name] = isinstance(weight, zerofp4.NVFP4Tensor)

    def forward(self, x):
        return self.experts(self.own(self.codes(torch.tanh(self.plain(x)))))


def started(mesh, inner: dict | None = None, outer: dict | None = None, **options):
    """inner, outer: options of fully_shard for layers, and for the module of all."""
    torch.manual_seed(0)
    model = Seen()
    fsdp2.prepare(model, lambda module, name: True)
    for layer in (model.plain, model.codes, model.experts):
        fully_shard(layer, mesh=mesh, **(inner or {}), **options)
    fully_shard(model, mesh=mesh, **(outer or {}), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, fsdp2.attach(model, optimizer)


def batch() -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1))


RESHARD, KEEP = {"reshard_after_forward": True}, {"reshard_after_forward": False}


@pytest.mark.parametrize(
    ("inner", "outer", "codes"),
    [
        ({}, {}, {"codes", "own"}),  # FSDP2 does not reshard the outermost module
        (RESHARD, RESHARD, {"codes"}),
        (KEEP, KEEP, {"plain", "codes", "experts", "own"}),
        (KEEP, RESHARD, {"plain", "codes", "experts"}),
    ],
)
@pytest.mark.parametrize("gathered_before", [False, True])
def test_values_for_modules_that_reshard_and_multiply_no_codes(mesh, inner, outer, codes, gathered_before):
    model, *_ = started(mesh, inner, outer)
    if gathered_before:  # before FSDP2 has decided which module is the outermost
        for module in (model, model.plain, model.codes, model.experts):
            module.unshard()
            module.reshard()
    for _ in range(2):
        model(batch()).sum().backward()
        assert {name for name, is_code in model.seen.items() if is_code} == codes


def test_resharding_may_be_set_until_the_first_gather(mesh):
    model, *_ = started(mesh)
    model.set_reshard_after_forward(False)
    model(batch()).sum().backward()
    assert all(model.seen.values())
    model.set_reshard_after_forward(True)
    model(batch()).sum().backward()
    assert all(model.seen.values())  # FSDP2 fills the tensors that there are


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16])
def test_values_and_codes_compute_the_same(mesh, policy):
    losses, models = [], []
    for options in (RESHARD, KEEP):
        model, optimizer, _ = started(mesh, options, options, mp_policy=policy)
        losses.append([])
        for _ in range(3):
            loss = model(batch()).float().square().mean()
            loss.backward()
            losses[-1].append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_bytes_equal(torch.stack(losses[0]), torch.stack(losses[1]), "losses")
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_bytes_equal(p.detach().to_local(), q.detach().to_local(), name)


@pytest.mark.parametrize("name", ["plain", "experts"])
def test_memory_of_values_and_of_what_they_came_from(mesh, name):
    """Codes are given back when they were read, values with the resharding."""
    model, *_ = started(mesh)
    layer = getattr(model, name)
    for _ in range(2):
        layer.unshard()
        values = next(layer.parameters())
        (group,) = fsdp2.torch_private._param_groups(layer._get_fsdp_state())
        codes = group.fsdp_params[0].all_gather_outputs
        storages = [tensor.untyped_storage() for tensor in (values, *codes)]
        assert [storage.nbytes() for storage in storages] == [values.numel() * 4, 0]
        layer.reshard()
        assert [storage.nbytes() for storage in storages] == [0, 0]


def test_gathers_leave_the_versions_of_values_alone(mesh):
    """A backward pass may use what a gather after the forward pass fills again, and none after a cast."""
    model, optimizer, _ = started(mesh, RESHARD, RESHARD)
    losses = [model(batch()).sum() for _ in range(2)]
    losses[0].backward()
    versions = []
    for cast in (False, False, True):
        if cast:
            optimizer.step()
        model.plain.unshard()
        versions.append(model.plain.weight._version)
        model.plain.reshard()
    assert versions[0] == versions[1] < versions[2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_inference_gathers_the_values_of_training(mesh):
    model, *_ = started(mesh, RESHARD, RESHARD)
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode, torch.inference_mode, torch.enable_grad):
        with mode():
            outputs.append(model(batch()))
    outputs[-1].sum().backward()
    for output in outputs[1:]:
        assert_bytes_equal(output.detach().clone(), outputs[0], "outputs")
