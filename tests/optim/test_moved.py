"""Storage that moves under a ZeroFP4Optimizer: no step before refresh(), and nothing changed."""

import copy

import pytest
import torch
from cases.optim import both, built, make_gradients, set_gradients, take_steps, unchanged
from helpers import assert_bytes_equal
from torch import nn

from zerofp4.optim import FusedAdamW

DEFAULTS = {"lr": 0.01, "weight_decay": 0.1}
CLASSES = pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, FusedAdamW])


def share_master(optimizer, parameter):
    optimizer.state[parameter]["master"].values.share_memory_()


def replace_master(_, optimizer):
    master = optimizer._shards.masters[0]
    master.data = master.data.clone()


MOVES = {
    "codes": (lambda ps, _: setattr(ps[0], "rowwise_data", ps[0].rowwise_data.clone()), r"\['params'\]\[0\]"),
    "record": (lambda ps, _: setattr(ps[0], "data", ps[0].data.clone()), r"\['params'\]\[0\]"),
    "dense": (lambda ps, _: setattr(ps[1], "data", ps[1].data.clone()), r"\['params'\]\[1\]"),
    "own master": (lambda ps, _: setattr(ps[3], "data", ps[3].data.clone()), r"\['params'\]\[3\]"),
    "master": (replace_master, r"master_weights\[0\]"),  # on a GPU the plan notices it behind its cast
}
# torch moves storages in place on the CPU only.
MOVES_IN_PLACE = {
    "shared codes": (lambda ps, _: ps[0].rowwise_data.share_memory_(), r"\['params'\]\[0\]: rowwise_data"),
    "shared dense": (lambda ps, _: ps[5].detach().share_memory_(), r"\['params'\]\[5\]"),
    "masters": (lambda ps, optimizer: share_master(optimizer, ps[0]), r"master_weights\[0\]"),
    "found_inf": (lambda _, optimizer: optimizer.found_inf.share_memory_(), "found_inf"),
}


@CLASSES
@pytest.mark.parametrize("what", [*MOVES, *MOVES_IN_PLACE])
def test_no_step_after_a_move_and_the_same_steps_after_refresh(device, what, optimizer_class):
    if what in MOVES_IN_PLACE and device.type != "cpu":
        pytest.skip("torch does not move storages in place on a GPU")
    move, name = (MOVES | MOVES_IN_PLACE)[what]
    plain, optimizer = both(device, optimizer_class, **DEFAULTS)
    take_steps(plain, optimizer, [0])
    move(plain.parameters, optimizer)
    set_gradients(plain.parameters, make_gradients(plain.parameters, 1))
    with unchanged(plain.parameters, optimizer, optimizer.found_inf):
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
            with pytest.raises(RuntimeError, match=rf"{name}.* has moved since .* call refresh\(\)"):
                call()
    if what != "master":  # a tensor of ours, whose buffer is of no more use
        optimizer.refresh()
        take_steps(plain, optimizer, [1, 2])


def test_refresh_drops_what_was_assigned(device):
    parameters, optimizer = built(device)
    with unchanged(parameters, optimizer):
        for i in (1, 3, 5):
            parameters[i].data = torch.full_like(parameters[i].data, 7)
        optimizer.refresh()
    optimizer.step()


def test_refresh_in_inference_mode(device):
    """The parameters are those of training, as they were."""
    parameters, optimizer = built(device)
    with torch.inference_mode():
        optimizer.refresh()
    assert not any(p.is_inference() for p in parameters)
    sum((p.dequantize() if hasattr(p, "record") else p).float().square().sum() for p in parameters).backward()
    optimizer.step()
    assert optimizer.found_inf.item() == 0


@pytest.mark.parametrize(("shape", "dtype"), [((300,), torch.float64), ((299,), torch.float16)])
def test_refresh_of_a_parameter_that_is_another(device, shape, dtype):
    parameters, optimizer = built(device)
    parameters[5].data = torch.zeros(shape, dtype=dtype, device=device)
    moved = parameters[0].rowwise_data = parameters[0].rowwise_data.clone()
    with pytest.raises(ValueError) as caught:
        optimizer.refresh()
    now = f"{str(dtype).removeprefix('torch.')} {shape}"
    assert f"['params'][5] was float16 (300,) on {device}, now it is {now} on" in str(caught.value)
    assert parameters[0].rowwise_data is moved


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
