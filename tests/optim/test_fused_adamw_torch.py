"""FusedAdamW is torch.optim.AdamW to a few roundings, and each loads what the other saved."""

import copy
import itertools
import pickle

import pytest
import torch
from fused_cases import set_gradient
from helpers import assert_bytes_equal

from zerofp4.optim import FusedAdamW


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999), (0.9, 0.0), (0.0, 0.0), (0.95, 0.95)])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_close_to_torch(device, betas, eps, weight_decay):
    """Within 4 eps * (|p| + lr) per step from the same state. torch's own variants differ from each other by
    as much: they order the operations in other ways, and some fuse multiplications into additions. Where
    beta1 is 0 or beta2 <= beta1^2, an update can be many times lr: then |p| is the larger of p before and p
    after, of which one is at least half the update.
    """
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    generator = torch.Generator().manual_seed(0)
    for lr, maximize, tensor_lr, dtype in itertools.product(
        (1e-3, 0.1), (False, True), (False, True), (torch.float32, torch.bfloat16)
    ):
        p = torch.randn(4000, generator=generator).to(device)
        given_lr = torch.tensor(lr, device=device) if tensor_lr else lr
        optimizer = FusedAdamW([p], lr=given_lr, maximize=maximize, **options)
        for step in range(6):
            set_gradient(p, torch.randn(4000, generator=generator).to(device, dtype))
            before, theirs = p.clone(), p.clone()
            plain = torch.optim.AdamW([theirs], lr=lr, maximize=maximize, **options)
            plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            plain.param_groups[0].update(lr=lr, fused=False)
            plain.state[theirs] = {k: v.cpu() if k == "step" else v for k, v in plain.state[theirs].items()}
            theirs.grad = p.grad.float()
            plain.step()
            optimizer.step()
            large = betas[0] == 0 or betas[1] <= betas[0] ** 2
            size = torch.maximum(before.abs(), theirs.abs()) if large else theirs.abs()
            error = (p - theirs).abs() / (torch.finfo(torch.float32).eps * (size + lr))
            assert error.max() <= 4, (lr, maximize, tensor_lr, dtype, step)


def trained(optimizer_class, device, steps, **options):
    """An optimizer of two groups after some steps; the second parameter has had no gradient yet."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(n, generator=generator).to(device) for n in (33, 40, 200)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02, "betas": (0.8, 0.9)}]
    optimizer = optimizer_class(groups, lr=0.01, **options)
    for _ in range(steps):
        for p in (parameters[0], parameters[2]):
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("steps", [0, 3])
def test_loads_what_torch_saved(device, options, steps):
    theirs, parameters = trained(torch.optim.AdamW, device, steps, **options)
    mine, copies = trained(FusedAdamW, device, 1)
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p, q in zip(parameters, copies, strict=True):
        q.copy_(p)
        assert (p in theirs.state) == (q in mine.state)
        for name, value in theirs.state.get(p, {}).items():
            assert_bytes_equal(mine.state[q][name], value.to(device), name)
    assert [group["lr"] for group in mine.param_groups] == [0.01, 0.02]
    for p, q in zip(parameters, copies, strict=True):
        q.grad = p.grad = torch.randn_like(p)
    theirs.step()
    mine.step()
    for p, q in zip(parameters, copies, strict=True):
        # The bound is test_close_to_torch's. torch's fused kernel takes 1 - beta^step in float32, which in
        # the first steps is good to 1e-5 of itself.
        torch.testing.assert_close(q, p, rtol=1e-6, atol=2e-7)
        assert mine.state[q]["step"].device == q.device


@pytest.mark.parametrize("steps", [0, 3])
def test_torch_loads_what_it_saved(device, steps):
    mine, parameters = trained(FusedAdamW, device, steps)
    theirs, copies = trained(torch.optim.AdamW, device, 1)
    theirs.load_state_dict(copy.deepcopy(mine.state_dict()))
    reference, _ = trained(torch.optim.AdamW, device, 1, fused=True)
    for group, expected in zip(mine.param_groups, reference.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }
    for p, q in zip(parameters, copies, strict=True):
        q.copy_(p)
        q.grad = p.grad = torch.randn_like(p)
    theirs.step()
    mine.step()
    for p, q in zip(parameters, copies, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=2e-7)  # as above
        assert theirs.state[q]["step"] == mine.state[p]["step"]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_own_state_goes_on_where_it_was(device, how):
    optimizer, parameters = trained(FusedAdamW, device, 2)
    loaded, copies = trained(FusedAdamW, device, 0)
    loaded.load_state_dict(how(optimizer.state_dict()))
    twin = how(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    for p, *others in zip(parameters, copies, twins, strict=True):
        p.grad = torch.randn_like(p)
        for q in others:
            q.copy_(p)
            q.grad = p.grad
    for one in (optimizer, loaded, twin):
        one.step()
    for p, *others in zip(parameters, copies, twins, strict=True):
        for q in others:
            assert_bytes_equal(q, p, "parameter")
