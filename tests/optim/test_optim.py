"""ZeroFP4Optimizer in one process: what torch.optim does to FP32 masters, and the weights they become."""

import copy
import math

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import (
    OPTIMIZERS,
    SPECIFICATIONS,
    Net,
    Plain,
    assert_all_equal,
    assert_weights_follow,
    batch,
    check,
    make_gradients,
    make_net,
    make_parameters,
    set_gradients,
)
from torch.nn import functional as F

import zerofp4
from zerofp4 import NVFP4Tensor, reference
from zerofp4.engine import ALIGNMENT
from zerofp4.optim import ZeroFP4Optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_plain_optimizer_over_fp32_masters(device, name):
    optimizer_class, defaults = OPTIMIZERS[name]
    parameters = make_parameters(device)
    plain = Plain(parameters, optimizer_class, **defaults)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, **defaults)
    check(optimizer, plain, "initial")
    for step in range(6):
        set_gradients(parameters, make_gradients(parameters, step))
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
    assert optimizer.defaults == plain.optimizer.defaults
    assert optimizer.found_inf.item() == 0


def split_groups(parameters):
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 0.05},
    ]


def test_groups_schedulers_and_edited_options(device):
    parameters = make_parameters(device)
    plain = Plain(parameters, torch.optim.AdamW, split_groups(parameters), lr=0.01)
    optimizer = ZeroFP4Optimizer(split_groups(parameters), lr=0.01)
    pairs = [(o, torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)) for o in (plain.optimizer, optimizer)]
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(6):
        set_gradients(parameters, make_gradients(parameters, step))
        plain.step()
        optimizer.step()
        for o, scheduler in pairs:
            scheduler.step()
            o.param_groups[0]["weight_decay"] = 0.1 / (step + 1)
        by_parameter = dict(zip(map(id, order), optimizer.gathered_masters(), strict=True))
        assert_all_equal([by_parameter[id(p)] for p in parameters], plain.masters, f"step {step}: master")
    assert optimizer.param_groups[1]["lr"] == 0.05 * 0.5**3
    for group, expected in zip(optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }


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


def test_gradients_accumulate_over_backward_passes(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
    parameters = list(net.parameters())
    masters = optimizer.gathered_masters()
    plain = torch.optim.AdamW(masters, lr=0.01)
    for step in range(3):
        for micro in range(3):
            net(batch(device, 10 * step + micro)).square().mean().backward()
        for master, p in zip(masters, parameters, strict=True):
            master.grad = p.grad.float()
        plain.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert all(p.grad is None if step % 2 == 0 else not p.grad.any() for p in parameters)
        assert_all_equal(optimizer.gathered_masters(), masters, f"step {step}: master")
        assert_weights_follow(parameters, masters)


def test_loss_falls(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.003)
    losses = []
    for step in range(60):
        loss = F.mse_loss(net(batch(device, step % 4)), batch(device, step % 4)[:, :6].float())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def test_closure_is_evaluated_with_gradients(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = net(batch(device, 0)).square().mean()
        loss.backward()
        calls.append(optimizer.clip_grad_norm_(1.0))
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad and len(calls) == 1
    expected = net(batch(device, 0)).square().mean()
    assert expected.item() != loss.item()


# Missing gradients and frozen parameters


def test_parameters_without_gradient_are_skipped(device):
    parameters = make_parameters(device)
    defaults = {"lr": 0.01, "weight_decay": 0.1}
    plain = Plain(parameters, torch.optim.AdamW, **defaults)
    optimizer = ZeroFP4Optimizer(parameters, **defaults)
    for step in range(4):
        gradients = make_gradients(parameters, step)
        for i in range(len(gradients)):
            if (i + step) % 3 == 0:
                gradients[i] = None
        set_gradients(parameters, gradients)
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")
    set_gradients(parameters, [None] * len(parameters))
    optimizer.step()
    check(optimizer, plain, "without any gradient:")


def test_parameters_frozen_before_keep_their_bytes(device):
    parameters = make_parameters(device)
    for p in parameters[:4]:
        p.requires_grad_(False)
    before = copy.deepcopy(parameters[:4])
    pointers = [p.rowwise_data.data_ptr() if isinstance(p, NVFP4Tensor) else p.data_ptr() for p in parameters]
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1)
    set_gradients(parameters[4:], make_gradients(parameters, 0)[4:])
    optimizer.step()
    masters = optimizer.gathered_masters()
    assert masters[:4] == [None] * 4 and all(m is not None for m in masters[4:])
    for i, (p, old) in enumerate(zip(parameters, before, strict=False)):
        if isinstance(p, NVFP4Tensor):
            assert_bytes_equal(p.rowwise_data, old.rowwise_data, f"parameter {i}")
        assert_bytes_equal(p.detach().float(), old.detach().float(), f"parameter {i}")
        assert pointers[i] == (p.rowwise_data if isinstance(p, NVFP4Tensor) else p).data_ptr()
    assert optimizer.param_groups[0]["params"] == parameters
    parameters[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\['params'\]\[0\] was frozen when the optimizer was built"):
        optimizer.step()


def test_a_parameter_frozen_later_is_one_without_gradient(device):
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1, weight_decay=0.5)
    parameters[0].requires_grad_(False)
    before = optimizer.gathered_masters()[0]
    set_gradients(parameters[1:], make_gradients(parameters, 0)[1:])
    optimizer.step()
    assert_bytes_equal(optimizer.gathered_masters()[0], before, "master")


# Initial values, views and non-finite masters


def test_masters_begin_with_the_values_before_conversion(device):
    torch.manual_seed(0)
    net = Net(torch.float32).to(device)
    values = [p.detach().clone() for p in net.parameters()]
    zerofp4.convert_model(net)
    parameters = list(net.parameters())
    assert isinstance(net.first.weight, NVFP4Tensor)
    optimizer = ZeroFP4Optimizer(parameters)
    assert_all_equal(optimizer.gathered_masters(), values, "master")
    assert net.first.weight.get_high_precision_init_val() is None
    assert_weights_follow(parameters, values)


def test_weights_lie_in_the_gather_buffers(device):
    """One behind the other, each in a storage of its own: who saves a model takes tensors over one storage
    for tied weights.
    """
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters)
    pointers = set()
    for step in range(3):
        kinds = {}
        for p in parameters:
            packed = isinstance(p, NVFP4Tensor)
            tensor, aligned = (p.rowwise_data, ALIGNMENT // 2) if packed else (p, ALIGNMENT * p.itemsize)
            if tensor.numel():
                kinds.setdefault((tensor.dtype, aligned), []).append(tensor)
        assert len(kinds) == 4
        for (_, aligned), tensors in kinds.items():
            begin = tensors[0].data_ptr()
            assert all((t.data_ptr() - begin) % aligned == 0 for t in tensors)
            before = sum(-(-t.nbytes // aligned) * aligned for t in tensors[:-1])
            assert tensors[-1].data_ptr() - begin == before
            assert all(t.untyped_storage().data_ptr() == t.data_ptr() for t in tensors)
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
        pointers.add(tuple(t.data_ptr() for tensors in kinds.values() for t in tensors))
        if step == 1:
            optimizer.refresh()
        set_gradients(parameters, make_gradients(parameters, 0))
        optimizer.step()
    assert len(pointers) == 1


def test_fp32_parameters_are_their_own_masters(device):
    (parameter,) = make_parameters(device, specifications=[((300,), torch.float32, False)])
    optimizer = ZeroFP4Optimizer([parameter])
    (master,) = optimizer.inner.param_groups[0]["params"]
    assert master.data_ptr() == parameter.data_ptr()


def test_nonfinite_masters_leave_their_weights_alone(device):
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=10.0)
    gradients = make_gradients(parameters, 0)
    optimizer.inner.param_groups[0]["params"][0][3 * 48 + 5] = math.nan
    gradients[1][2] = 3e38  # times lr it overflows
    codes = parameters[0].rowwise_data.clone()
    set_gradients(parameters, gradients)
    optimizer.step()
    assert optimizer.found_inf.item() == 1
    assert_bytes_equal(parameters[0].rowwise_data, codes, "codes")
    masters = optimizer.gathered_masters()
    assert masters[0][3, 5].isnan() and parameters[1][2].isinf()
    assert_weights_follow(parameters[1:], masters[1:])


def test_found_inf_speaks_of_the_last_step(device):
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters)
    optimizer.found_inf.fill_(1)
    optimizer.step()
    assert optimizer.found_inf.item() == 0


def test_amax_groups(device):
    """Matrices share one amax, experts those of the experts with the same index."""
    more = [((16, 96), torch.bfloat16, True), ((3, 16, 32), torch.bfloat16, True)]
    parameters = make_parameters(device, 0, [*SPECIFICATIONS, *more])
    groups = [[parameters[i] for i in members] for members in ((0, 9), (8, 10))]
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, amax_groups=groups, lr=0.1)
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    masters = dict(zip(parameters, optimizer.gathered_masters(), strict=True))
    for group in groups:
        values = [masters[p].to(torch.bfloat16) for p in group]
        amax = torch.stack([v.float().abs().amax((-2, -1)).view(-1) for v in values]).amax(0)
        for p, v in zip(group, values, strict=True):
            specified = reference.quantize if p.dim() == 2 else reference.quantize_experts
            for name, value in specified(v.view(p.shape), amax=amax)._asdict().items():
                assert_bytes_equal(getattr(p, name), value, name)


def test_one_expert_is_skipped(device):
    """What has no finite master keeps its codes, scales and amax; the experts beside it do not."""
    parameter = make_parameters(device, 0, [((3, 16, 32), torch.bfloat16, True)])[0]
    optimizer = ZeroFP4Optimizer([parameter], torch.optim.SGD, lr=0.1)
    before = parameter.detach().clone()
    optimizer.inner.param_groups[0]["params"][0][16 * 32 + 5] = math.nan
    set_gradients([parameter], make_gradients([parameter], 0))
    optimizer.step()
    assert optimizer.found_inf.item() == 1
    expected = reference.quantize_experts(optimizer.gathered_masters()[0].bfloat16())._asdict()
    for name, values in expected.items():
        values[1] = getattr(before, name)[1]
        assert_bytes_equal(getattr(parameter, name), values, name)
    assert not torch.equal(parameter.rowwise_data[0], before.rowwise_data[0])


def test_a_world_of_one_gathers_nothing(device):
    optimizer = ZeroFP4Optimizer(make_parameters(device))
    assert optimizer.gathered_bytes_per_step() == {"nvfp4": 0, "high_precision": 0, "bf16_equivalent": 0}


def test_a_backward_pass_through_old_weights_fails(device):
    net = make_net(device)
    optimizer = ZeroFP4Optimizer(net.parameters())
    loss = net(batch(device, 0)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_update_leaves_the_neighbours_in_the_buffer_alone(device):
    specifications = [((16, 18 + 2 * i), torch.bfloat16, True) for i in range(5)]
    parameters = make_parameters(device, specifications=specifications)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=100.0)
    for i in range(5):
        before = [p.rowwise_data.clone() for p in parameters]
        gradients = [None] * 5
        gradients[i] = make_gradients(parameters, i)[i]
        set_gradients(parameters, gradients)
        optimizer.step()
        for j, (p, old) in enumerate(zip(parameters, before, strict=True)):
            assert torch.equal(p.rowwise_data, old) == (i != j)
