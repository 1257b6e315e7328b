"""Storage that moves under a ZeroFP4Optimizer: no step before refresh(), and nothing changed."""

import copy

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import Plain, assert_all_equal, check, make_gradients, make_parameters, set_gradients
from torch import nn

from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}


def share_masters(parameters, optimizer):
    optimizer.state[parameters[0]]["master"].values.share_memory_()


MOVES = {
    "codes": (lambda ps, _: setattr(ps[0], "rowwise_data", ps[0].rowwise_data.clone()), r"\['params'\]\[0\]"),
    "record": (lambda ps, _: setattr(ps[0], "data", ps[0].data.clone()), r"\['params'\]\[0\]"),
    "dense": (lambda ps, _: setattr(ps[1], "data", ps[1].data.clone()), r"\['params'\]\[1\]"),
    "own master": (lambda ps, _: setattr(ps[3], "data", ps[3].data.clone()), r"\['params'\]\[3\]"),
}
# torch moves storages in place on the CPU only.
MOVES_IN_PLACE = {
    "scales": (lambda ps, _: ps[4].rowwise_scale.share_memory_(), r"\['params'\]\[4\]: rowwise_scale"),
    "columnwise codes": (lambda ps, _: ps[4].columnwise_data.share_memory_(), r"\[4\]: columnwise_data"),
    "shared codes": (lambda ps, _: ps[0].rowwise_data.share_memory_(), r"\['params'\]\[0\]: rowwise_data"),
    "shared dense": (lambda ps, _: ps[5].detach().share_memory_(), r"\['params'\]\[5\]"),
    "masters": (share_masters, r"master_weights\[0\]"),
    "found_inf": (lambda _, optimizer: optimizer.found_inf.share_memory_(), "found_inf"),
}


def everything(parameters, optimizer):
    """Copies of all that a step changes."""
    tensors = [*optimizer.gathered_masters(), optimizer.found_inf]
    for p in parameters:
        tensors += [b for _, b in p.record.buffers()] if isinstance(p, NVFP4Tensor) else [p.detach()]
    for _, state in sorted(optimizer.inner.state_dict()["state"].items()):
        tensors += [state[key] for key in sorted(state)]
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("what", [*MOVES, *MOVES_IN_PLACE])
def test_no_step_after_a_move_and_the_same_steps_after_refresh(device, what, optimizer_class):
    if what in MOVES_IN_PLACE and device.type != "cpu":
        pytest.skip("torch does not move storages in place on a GPU")
    move, name = (MOVES | MOVES_IN_PLACE)[what]
    parameters = make_parameters(device)
    plain = Plain(parameters, optimizer_class, **DEFAULTS)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, **DEFAULTS)
    for step in range(3):
        set_gradients(parameters, make_gradients(parameters, step))
        if step == 1:
            move(parameters, optimizer)
            before = everything(parameters, optimizer)
            for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
                with pytest.raises(RuntimeError, match=rf"{name}.* has moved since .* call refresh\(\)"):
                    call()
            assert_all_equal(everything(parameters, optimizer), before, "tensor")
            optimizer.refresh()
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


def test_refresh_drops_what_was_assigned(device):
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters)
    before = everything(parameters, optimizer)
    for i in (1, 3, 5):
        parameters[i].data = torch.full_like(parameters[i].data, 7)
    optimizer.refresh()
    assert_all_equal(everything(parameters, optimizer), before, "tensor")
    storages = {
        p.untyped_storage().data_ptr() for p in parameters if p.dtype == torch.float16 and p.dim() < 2
    }
    assert storages == {parameters[5].untyped_storage().data_ptr()}
    optimizer.step()


def test_refresh_in_inference_mode(device):
    """The parameters are those of training, as they were."""
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters)
    with torch.inference_mode():
        optimizer.refresh()
    assert not any(p.is_inference() for p in parameters)
    sum((p.dequantize() if hasattr(p, "record") else p).float().square().sum() for p in parameters).backward()
    optimizer.step()
    assert optimizer.found_inf.item() == 0


def test_refresh_of_a_parameter_that_is_another(device):
    for data, now in [
        (torch.zeros(300, dtype=torch.float64), "float64 (300,)"),
        (torch.zeros(299, dtype=torch.float16), "float16 (299,)"),
    ]:
        parameters = make_parameters(device)
        optimizer = ZeroFP4Optimizer(parameters)
        parameters[5].data = data.to(device)
        moved = parameters[0].rowwise_data = parameters[0].rowwise_data.clone()
        with pytest.raises(ValueError) as caught:
            optimizer.refresh()
        assert f"['params'][5] was float16 (300,) on {device}, now it is {now} on" in str(caught.value)
        assert parameters[0].rowwise_data is moved


def test_a_master_that_was_exchanged_is_found_before_a_step(device):
    """Nothing has changed by then, on a GPU too, where the plan itself would notice it behind its cast."""
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=0.1)
    set_gradients(parameters, make_gradients(parameters, 0))
    master = optimizer._shards.masters[0]
    before = everything(parameters, optimizer)
    master.data = master.data.clone()
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"master_weights\[0\].* has moved since"):
            call()
    assert_all_equal(everything(parameters, optimizer), before, "tensor")


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])
def test_the_master_of_an_fp32_parameter_may_move_in_place(device, optimizer_class):
    """It is the parameter's own memory until then."""
    if device.type != "cpu":
        pytest.skip("torch does not move storages in place on a GPU")
    parameters = make_parameters(device)
    plain = Plain(parameters, optimizer_class, **DEFAULTS)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, **DEFAULTS)
    for step in range(3):
        set_gradients(parameters, make_gradients(parameters, step))
        if step == 1:
            optimizer.state[parameters[3]]["master"].values.share_memory_()
            optimizer.refresh()
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


def test_moments_may_move(device):
    """The optimizer of the masters takes their addresses itself."""
    (parameter,) = make_parameters(device, specifications=[((64, 64), torch.bfloat16, True)])
    plain = Plain([parameter], FusedAdamW, **DEFAULTS)
    optimizer = ZeroFP4Optimizer([parameter], FusedAdamW, **DEFAULTS)
    for step in range(3):
        set_gradients([parameter], make_gradients([parameter], step))
        if step == 1:
            (state,) = optimizer.inner.state.values()
            state["exp_avg"] = state["exp_avg"].clone()
            state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


def test_a_state_that_is_replaced_is_not_kept():
    p = nn.Parameter(torch.randn(1000))
    optimizer = FusedAdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    old = torch.utils.weak.WeakTensorKeyDictionary({optimizer.state[p]["exp_avg"]: 0})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not len(old)
    before = p.detach().clone()
    optimizer.step()
    with pytest.raises(AssertionError):
        assert_bytes_equal(p.detach(), before, "parameter")
