"""ZeroFP4Optimizer over FusedAdamW, whose steps leave the amaxes that publishing the weights needs."""

import copy

import pytest
import torch
from helpers import assert_bytes_equal
from optim_cases import Plain, check, make_gradients, make_parameters, set_gradients

from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}


class Alone(FusedAdamW):
    """Keeps its amaxes to itself: the plan takes them."""

    def offer_parts(self, parts, present=None):
        pass


def model_bytes(parameters):
    tensors = []
    for p in parameters:
        tensors += [b for _, b in p.record.buffers()] if isinstance(p, NVFP4Tensor) else [p.detach()]
    return [tensor.contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors]


def assert_same_model(parameters, others):
    for i, (mine, theirs) in enumerate(zip(model_bytes(parameters), model_bytes(others), strict=True)):
        assert_bytes_equal(mine, theirs, f"buffer {i}")


@pytest.fixture
def amax_passes(monkeypatch):
    """How many times plans have computed amaxes themselves."""
    import zerofp4.ops.stages

    calls = []
    begin_amax = zerofp4.ops.stages.CastStages.begin_amax
    monkeypatch.setattr(
        zerofp4.ops.stages.CastStages,
        "begin_amax",
        lambda stages, target: (calls.append(1), begin_amax(stages, target)),
    )
    return calls


def test_the_same_bytes_without_the_amax_pass(device, amax_passes):
    parameters, others = make_parameters(device), make_parameters(device)
    plain = Plain(parameters, FusedAdamW, **DEFAULTS)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, **DEFAULTS)
    alone = ZeroFP4Optimizer(others, Alone, **DEFAULTS)
    amax_passes.clear()
    for step in range(5):
        gradients = make_gradients(parameters, step)
        for i in range(len(gradients)):
            if (i + step) % 4 == 0:
                gradients[i] = None
        set_gradients(parameters, gradients)
        set_gradients(others, gradients)
        plain.step()
        optimizer.step()
        assert len(amax_passes) == step
        alone.step()
        assert len(amax_passes) == step + 1
        check(optimizer, plain, f"step {step}:")
        assert_same_model(parameters, others)
    assert optimizer.found_inf.item() == 0


def test_masters_that_become_infinite_leave_their_weight(device):
    parameters, others = make_parameters(device), make_parameters(device)
    optimizers = [ZeroFP4Optimizer(parameters, FusedAdamW), ZeroFP4Optimizer(others, Alone)]
    for ps, optimizer in zip((parameters, others), optimizers, strict=True):
        set_gradients(ps, make_gradients(ps, 0))
        optimizer.inner.param_groups[0]["params"][0][3 * 48 + 5] = float("inf")
    codes = parameters[0].rowwise_data.clone()
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.found_inf.item() == 1
    assert_bytes_equal(parameters[0].rowwise_data, codes, "codes")
    assert_same_model(parameters, others)


def test_loaded_masters_are_not_cast_with_amaxes_left_before(device):
    """A hook that raises after the update leaves amaxes which belong to masters that are then loaded over."""
    parameters = make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, **DEFAULTS)
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
    state, expected = copy.deepcopy(optimizer.state_dict()), model_bytes(parameters)

    def fail(*_):
        raise RuntimeError("no step today")

    handle = optimizer.inner.register_step_post_hook(fail)
    set_gradients(parameters, [10 * g for g in make_gradients(parameters, 1)])
    with pytest.raises(RuntimeError, match="no step today"):
        optimizer.step()
    handle.remove()
    optimizer.load_state_dict(state)
    for i, (mine, theirs) in enumerate(zip(model_bytes(parameters), expected, strict=True)):
        assert_bytes_equal(mine, theirs, f"buffer {i}")


def multiply_masters(optimizer, *_):
    for group in optimizer.param_groups:
        for master in group["params"]:
            master.mul_(100)


class Multiplied(FusedAdamW):
    """Writes to its masters after it has left their amaxes."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            multiply_masters(self)
        return loss


@pytest.mark.parametrize("how", ["hook", "subclass", "one master"])
def test_masters_written_after_the_update_are_not_cast_with_its_amaxes(device, amax_passes, how):
    parameters, others = make_parameters(device), make_parameters(device)
    optimizer = ZeroFP4Optimizer(parameters, Multiplied if how == "subclass" else FusedAdamW, **DEFAULTS)
    alone = ZeroFP4Optimizer(others, Alone, **DEFAULTS)

    def write(inner, *_):
        if how == "one master":
            inner.param_groups[0]["params"][0].mul_(100)
        else:
            multiply_masters(inner)

    handles = [alone.inner.register_step_post_hook(write)]
    if how != "subclass":
        handles.append(optimizer.inner.register_step_post_hook(write))
    amax_passes.clear()
    for step in range(3):
        if step == 2 and how != "subclass":  # from then on the amaxes are used again
            for handle in handles:
                handle.remove()
        for ps, one in ((parameters, optimizer), (others, alone)):
            set_gradients(ps, make_gradients(ps, step))
            one.step()
        assert_same_model(parameters, others)
    assert len(amax_passes) == (6 if how == "subclass" else 5)


def test_goes_on_from_its_state(device):
    parameters, others = make_parameters(device), make_parameters(device, seed=1)
    optimizers = [ZeroFP4Optimizer(ps, FusedAdamW, **DEFAULTS) for ps in (parameters, others)]
    for step in range(4):
        for ps, optimizer in zip((parameters, others), optimizers, strict=True):
            set_gradients(ps, make_gradients(ps, step if step > 1 else step + 10 * (ps is others)))
            optimizer.step()
        if step == 1:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        if step >= 1:
            assert_same_model(parameters, others)


def test_amsgrad_is_refused_before_anything_is_built(device):
    parameters = make_parameters(device)
    before = model_bytes(parameters)
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        ZeroFP4Optimizer(parameters, FusedAdamW, amsgrad=True)
    for mine, old in zip(model_bytes(parameters), before, strict=True):
        assert_bytes_equal(mine, old, "buffer")
