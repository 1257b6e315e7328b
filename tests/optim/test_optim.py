"""ZeroFP4Optimizer in one process: what torch.optim does to FP32 masters, and the weights they become."""

import pytest
import torch
from cases.optim import (
    OPTIMIZERS,
    Plain,
    batch,
    both,
    built,
    check,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
    take_step,
    take_steps,
)
from distributed.optim.matrix_cases import MATRICES, make_groups
from torch import nn

from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_plain_optimizer_over_fp32_masters(device, name):
    optimizer_class, defaults = OPTIMIZERS[name]
    plain, optimizer = both(device, optimizer_class, **defaults)
    check(optimizer, plain, "initial")
    optimizer.found_inf.fill_(1)  # it speaks of the last step
    take_steps(plain, optimizer, range(6))
    assert optimizer.defaults == plain.optimizer.defaults
    assert optimizer.found_inf.item() == 0
    assert optimizer.gathered_bytes_per_step() == {"nvfp4": 0, "high_precision": 0, "bf16_equivalent": 0}


def test_groups_edited_options_and_missing_gradients(device):
    """Also of parameters that were frozen after the optimizer was built."""
    parameters = make_parameters(device)
    groups = [
        {"params": parameters[:4], "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": parameters[4:], "lr": 0.05},
    ]
    plain = Plain(parameters, torch.optim.AdamW, groups, lr=0.01)
    optimizer = ZeroFP4Optimizer(groups, lr=0.01)
    pairs = [(o, torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)) for o in (plain.optimizer, optimizer)]
    for step in range(6):
        gradients = enumerate(make_gradients(parameters, step))
        set_gradients(parameters, [None if (i + step) % 3 == 0 or step == 4 else g for i, g in gradients])
        parameters[0].requires_grad_(step != 3)
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
        for o, scheduler in pairs:
            scheduler.step()
            o.param_groups[0]["weight_decay"] = 0.1 / (step + 1)
    assert optimizer.param_groups[1]["lr"] == 0.05 * 0.5**3
    for group, expected in zip(optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert group | {"params": []} == expected | {"params": []}


def test_options_that_the_inner_optimizer_changes_come_back(device):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1

    (parameter,) = make_parameters(device, specifications=[((4,), torch.float32, False)])
    optimizer = ZeroFP4Optimizer([parameter], Counting, lr=0.1)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.param_groups[0]["steps"] == 3


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


def test_parameters_frozen_before_keep_their_bytes(device):
    parameters = make_parameters(device)
    for p in parameters[:4]:
        p.requires_grad_(False)
    frozen = [getattr(p, "rowwise_data", p).detach() for p in parameters[:4]]
    before = [(buffer.data_ptr(), buffer.clone()) for buffer in frozen]
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1)
    set_gradients(parameters[4:], make_gradients(parameters, 0)[4:])
    optimizer.step()
    assert [master is None for master in optimizer.gathered_masters()] == [True] * 4 + [False] * 5
    for p, (pointer, old) in zip(parameters, before, strict=False):
        buffer = getattr(p, "rowwise_data", p).detach()
        assert buffer.data_ptr() == pointer and buffer.equal(old)
    parameters[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\['params'\]\[0\] was frozen when the optimizer was built"):
        optimizer.step()


def test_weights_stay_where_they_lie(device):
    """Each in a storage of its own: who saves a model takes tensors over one storage for tied weights. FP32
    parameters are their own masters.
    """
    parameters, optimizer = built(device)
    assert optimizer.inner.param_groups[0]["params"][3].data_ptr() == parameters[3].data_ptr()
    tensors = [p.rowwise_data if isinstance(p, NVFP4Tensor) else p for p in parameters if p.numel()]
    before = [tensor.data_ptr() for tensor in tensors]
    for call in (lambda: take_step(parameters, optimizer, 0), optimizer.refresh) * 2:
        call()
        for tensor in tensors:
            assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert [tensor.data_ptr() for tensor in tensors] == before


def test_a_backward_pass_through_old_weights_fails(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters())
    loss = net(batch(device, 0)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_repr_of_an_optimizer():
    parameters = make_parameters(torch.device("cpu"))
    parameters[1].requires_grad_(False)
    optimizer = ZeroFP4Optimizer([(f"p{i}", p) for i, p in enumerate(parameters)], torch.optim.SGD, lr=0.125)
    lines = repr(optimizer).splitlines()
    assert lines[:5] == [
        "ZeroFP4Optimizer (",
        "parameters: 4 NVFP4, 4 others, 1 frozen",
        f"masters: {sum(p.numel() for p in parameters) - 7} elements on this rank, by SGD",
        "world size: 1, transport: none, buckets: 4",
        "Parameter Group 0",
    ]
    assert "    lr: 0.125" in lines and not any("param_names" in line for line in lines)
