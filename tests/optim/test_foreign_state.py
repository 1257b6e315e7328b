"""What ZeroFP4Optimizer loads of torch: its state dicts, and what its schedulers keep in parameter groups."""

import pytest
import torch
from cases.optim import assert_all_equal, built, make_parameters, take_step, through_a_file
from helpers import assert_bytes_equal
from torch.optim.lr_scheduler import OneCycleLR

from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def test_torch_has_no_entries_of_a_parameter_that_never_had_a_gradient(device):
    """Its moments begin anew here, and masters stay."""
    parameters, optimizer = built(device, seed=0)
    theirs = [torch.nn.Parameter(torch.zeros(p.shape, device=device)) for p in parameters]
    plain = torch.optim.AdamW(theirs)
    for p in theirs[1:]:
        p.grad = torch.ones_like(p)
    plain.step()
    optimizer.step()
    masters = optimizer.gathered_masters()
    optimizer.load_state_dict(plain.state_dict())
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    steps = [optimizer.state[p]["step"].whole().item() for p in parameters if p.numel()]
    assert steps == [0] + [1] * (len(steps) - 1)


def test_two_parameters_of_one_name_in_a_state_dict(device):
    """As torch saves groups of two models. Without names both sides match by position."""
    values = [torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(2)]
    plain = torch.optim.AdamW([{"params": [("weight", p)]} for p in values])
    for i, p in enumerate(values):
        p.grad = torch.full_like(p, 1.0 + i)
    plain.step()
    state = plain.state_dict()
    one, two = (torch.nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
    with pytest.raises(ValueError, match="2 parameters are called 'weight'"):
        ZeroFP4Optimizer([("weight", one)]).load_state_dict(state)
    loaded = ZeroFP4Optimizer([{"params": [p]} for p in (one, two)])
    loaded.load_state_dict(state)
    for p, own in zip(values, (one, two), strict=True):
        moment = loaded.state[own]["exp_avg"].whole()
        assert_bytes_equal(moment, plain.state[p]["exp_avg"], "exp_avg")


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
def test_a_scheduler_goes_on_from_loaded_groups(device, optimizer_class):
    """torch's schedulers keep values in the groups: with last_epoch, a new one finds them there."""

    def run(optimizer, scheduler, steps):
        for step in steps:
            take_step(optimizer.param_groups[0]["params"], optimizer, step)
            scheduler.step()
        return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}

    first, second = (ZeroFP4Optimizer(make_parameters(device), optimizer_class, lr=lr) for lr in (0.1, 0.7))
    scheduler = OneCycleLR(first, max_lr=0.5, total_steps=20)
    run(first, scheduler, range(4))
    second.load_state_dict(through_a_file(first.state_dict()))
    resumed = OneCycleLR(second, max_lr=0.5, total_steps=20, last_epoch=scheduler.last_epoch - 1)
    assert run(second, resumed, range(4, 8)) == run(first, scheduler, range(4, 8))
    assert_all_equal(second.gathered_masters(), first.gathered_masters(), "master")
