"""Optimizers that need whole matrices, in one process: what they take, save and load."""

import pytest
import torch
from cases.optim import assert_all_equal, keywords, make_parameters, take_step
from distributed.optim.matrix_cases import MATRICES, MUON, make_groups
from torch import nn

from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def test_options_of_each_class_are_its_own(device):
    _, groups = make_groups(device, "fused")
    optimizer = ZeroFP4Optimizer(groups, torch.optim.Muon, momentum=0.9)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.01, 0.05]
    assert [group.get("momentum") for group in optimizer.param_groups] == [0.9, None, 0.9]
    assert [group.get("betas") for group in optimizer.param_groups] == [None, (0.9, 0.999), None]
    assert "optimizer_class" in groups[1] and "optimizer_class" not in optimizer.param_groups[1]
    assert optimizer.defaults["ns_steps"] == 5
    assert [type(inner) for inner in optimizer.inners.all] == [torch.optim.Muon, FusedAdamW]
    message = r"the masters have Muon and FusedAdamW: take them from inners\.all"
    with pytest.raises(AttributeError, match=message):
        _ = optimizer.inner
    frozen = nn.Parameter(torch.ones(4, device=device), requires_grad=False)  # of any shape
    alone = ZeroFP4Optimizer([*make_parameters(device, 0, MATRICES), frozen], torch.optim.Muon)
    assert type(alone.inner) is torch.optim.Muon and alone.inners.all == (alone.inner,)


def bad_arguments(device):
    matrix, other, bias = (nn.Parameter(torch.zeros(n, device=device)) for n in ((4, 6), (5, 4), (4,)))
    first, second = make_parameters(device, 0, MATRICES[:2])
    adamw, adafactor = torch.optim.AdamW, torch.optim.Adafactor
    whole = {"whole_matrices": True}

    def with_bias(**options):
        return [{"params": [matrix]}, {"params": [bias], **options}]

    message = r"\[0\]\['params'\]\[1\] 'fc.bias' has shape \(4,\), and torch.optim.Muon gets whole matrices"
    yield ValueError, message, [("fc.weight", matrix), ("fc.bias", bias)], {}
    message = "torch.optim.adamw.AdamW gets whole matrices"
    yield ValueError, message, [bias], {"optimizer_class": adamw, **whole}
    message = "optimizer_class: Muon cannot run on shards of parameters, it orthogonalizes whole matrices"
    yield ValueError, message, [matrix], {"whole_matrices": False}
    message = "whole_matrices must be None, True or False, got 'False'"
    yield TypeError, message, [matrix], {"whole_matrices": "False"}
    yield ValueError, "state must be .*, got 'compcat'", [matrix], {"state": "compcat"}
    message = r"\[1\]\['optimizer_class'\] is AdamW, and lr was given for Muon: a group with a class"
    yield ValueError, message, with_bias(optimizer_class=adamw), {"lr": 0.1}
    message = r"param_groups\[1\]\['optimizer_class'\] must be a subclass of torch.optim.Optimizer, got <cla"
    yield TypeError, message, with_bias(optimizer_class=int), {}
    message = r"param_groups\[1\]\['optimizer_class'\]: Adafactor cannot run on shards.*whole_matrices=True"
    yield ValueError, message, with_bias(optimizer_class=adafactor), {}
    groups = with_bias(optimizer_class=adamw, betas=(2.0, 0.9))
    yield ValueError, "Invalid beta", groups, {}
    groups = [{"params": [p], "optimizer_class": adamw} for p in (matrix, other)]
    message = "momentum: given for Muon, which is the class of no group"
    yield ValueError, message, groups, {"momentum": 0.9}
    yield ValueError, "whole_matrices: given for Muon", groups, whole
    groups = [{"params": [first]}, {"params": [second], "optimizer_class": adamw}]
    message = r"\[0\].* and .*\[1\].* share an amax, so they must have the same optimizer_class"
    yield ValueError, message, groups, {"amax_groups": [[first, second]]}


def test_bad_arguments(device):
    for kind, message, params, options in bad_arguments(device):
        with pytest.raises(kind, match=message):
            ZeroFP4Optimizer(params, **keywords({"optimizer_class": torch.optim.Muon, **options}))


@pytest.mark.parametrize("beside", [False, True])
def test_a_class_that_cannot_be_built_without_its_options(device, beside):
    class Required(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)

    p, q = (nn.Parameter(torch.ones(shape, device=device)) for shape in ((4, 6), (4,)))
    other = {"params": [q], "optimizer_class": torch.optim.SGD, "lr": 0.5}
    optimizer = ZeroFP4Optimizer([{"params": [p]}, other] if beside else [p, q], Required, lr=0.25)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert (p == 0.75).all() and (q == (0.5 if beside else 0.75)).all()


def test_a_state_dict_that_does_not_fit_changes_neither_optimizer(device):
    parameters, groups = make_groups(device, "fused")
    optimizer = ZeroFP4Optimizer(groups, torch.optim.Muon, **MUON)
    for seed in range(2):
        take_step(parameters, optimizer, seed)
    states = [(inner.state, inner.param_groups) for inner in optimizer.inners.all]
    masters, bad = optimizer.gathered_masters(), optimizer.state_dict()
    bad["param_groups"][1]["betas"] = (2.0, 0.9)
    other = ZeroFP4Optimizer(make_groups(device, "sgd")[1], torch.optim.Muon, **MUON).state_dict()
    for state_dict, message in ((bad, "betas"), (other, r"param_groups\[1\].*\.step is missing")):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        for inner, (state, groups) in zip(optimizer.inners.all, states, strict=True):
            assert inner.state is state and inner.param_groups == groups
        assert_all_equal(optimizer.gathered_masters(), masters, "master")
