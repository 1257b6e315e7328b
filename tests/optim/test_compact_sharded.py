"""ZeroFP4Optimizer(state="compact") in a world of one: what it keeps, hands over and refuses. Its steps are
in distributed/optim/test_reference_step.
"""

import copy
import weakref

import pytest
import torch
from cases.optim import assert_all_equal, keywords, make_gradients, set_gradients, take_step
from distributed.optim.compact_cases import HYPERS, Whole, make_sharded
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from zerofp4.engine import joined
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def build(parameters, **options):
    return ZeroFP4Optimizer(parameters, FusedAdamW, **keywords(HYPERS, {"state": "compact"} | options))


def test_what_is_kept():
    """5.1 bytes for each element; a bf16 weight is a plane of its master."""
    p = nn.Parameter(zerofp4.quantize(torch.randn(64, 1024, dtype=torch.bfloat16)))
    q = nn.Parameter(torch.randn(64, 1024, dtype=torch.bfloat16))
    optimizer = build([p, q])
    take_step([p, q], optimizer, 0)
    packed, dense = optimizer._shards.buckets
    assert packed.masters.nbytes + packed.low.nbytes == 3 * p.numel()
    assert dense.masters.data_ptr() == q.data_ptr() and dense.low.nbytes == q.numel()
    for weight in (p, q):
        size = sum(piece.values.nbytes for piece in optimizer.state[weight].values())
        assert size == 5 * weight.numel() + weight.numel() // 8 + 4


def test_groups_choose(device):
    """Each its own state; beside another class in one optimizer all are updated at once."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    parameters = make_sharded(device)
    expected, sgd = Whole(parameters), nn.Parameter(torch.randn(6, 64, device=device))
    beside = {"params": [sgd], "optimizer_class": torch.optim.SGD, "lr": 0.1, "weight_decay": 0.0}
    groups = [{"params": part, "state": "compact"} for part in (parameters[:4], parameters[4:])]
    optimizer = ZeroFP4Optimizer([*groups, beside], FusedAdamW, **HYPERS)
    assert optimizer.describe()["obstacle"] is not None
    before = sgd.detach().clone()
    for step in range(2):
        set_gradients(parameters, make_gradients(parameters, step))
        sgd.grad = torch.ones_like(sgd)
        optimizer.step()
        expected.step([p.grad for p in parameters])
        expected.check_state(optimizer, f"step {step}:")
    assert_bytes_equal(sgd.detach(), before - 0.1 - 0.1, "parameter of SGD")


def test_groups_that_keep_another_state(device):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    one, other, third = (nn.Parameter(torch.randn(8, 64, device=device)) for _ in range(3))
    fused = {"optimizer_class": FusedAdamW, "lr": 0.1}
    groups = [{"params": [one]}, {"params": [other], "state": "full", **fused}, {"params": [third], **fused}]
    optimizer = ZeroFP4Optimizer(groups, torch.optim.Muon, state="compact")
    for p, name in ((one, "momentum_buffer"), (other, "exp_avg"), (third, "scales")):
        assert name in optimizer.state[p]


# What else reads masters


def test_masters_move_between_optimizers(device):
    """Those of 24 bits stay what they are in 32 bits, and come back so."""
    parameters = make_sharded(device)
    optimizer = build(parameters)
    take_step(parameters, optimizer, 0)
    masters = optimizer.gathered_masters()
    full = ZeroFP4Optimizer(parameters, FusedAdamW, masters_from=optimizer, **HYPERS)
    assert_all_equal(full.gathered_masters(), masters, "full")
    again = build(parameters, masters_from=full)
    assert_all_equal(again.gathered_masters(), masters, "compact")


# What is refused


@pytest.mark.parametrize(
    ("options", "group", "message"),
    [
        ({"state": "small"}, {}, 'state must be "full" or "compact", got .small.'),
        ({}, {"state": "small"}, 'state must be "full" or "compact", got .small.'),
        ({"optimizer_class": torch.optim.SGD, "state": "compact"}, {}, "is of FusedAdamW .* class is SGD"),
        ({"whole_matrices": True, "state": "compact"}, {}, "is of FusedAdamW without whole_matrices"),
    ],
)
def test_bad_arguments(options, group, message):
    p = nn.Parameter(torch.zeros(4, 64))
    with pytest.raises(ValueError, match=message):
        ZeroFP4Optimizer([{"params": [p], **group}], **{"optimizer_class": FusedAdamW, "lr": 0.1} | options)
    wide, narrow = (nn.Parameter(zerofp4.quantize(torch.zeros(16, cols))) for cols in (64, 32))
    with pytest.raises(ValueError, match="share an amax, so they must have the same"):
        build([wide, narrow], amax_groups=[[wide, narrow]])


def test_a_torch_without_grad_dtype(monkeypatch):
    """Where all masters are updated at once they need gradients in another dtype than theirs."""
    monkeypatch.setattr("zerofp4.optim.build.HAS_GRAD_DTYPE", False)
    p, q = (nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16)) for _ in range(2))
    build([p])
    beside = {"params": [q], "optimizer_class": torch.optim.SGD, "lr": 0.1, "weight_decay": 0.0}
    with pytest.raises(ValueError, match=r'state="compact" beside SGD gives .* torch 2.11 has grad_dtype'):
        build([{"params": [p], "state": "compact"}, beside], state="full")


def test_a_choice_that_is_changed_later():
    parameters = [nn.Parameter(torch.randn(4, 64, dtype=torch.bfloat16)) for _ in range(2)]
    groups = [{"params": [p], "state": s} for p, s in zip(parameters, ("compact", "full"), strict=True)]
    optimizer = ZeroFP4Optimizer(groups, FusedAdamW, lr=0.1)
    take_step(parameters, optimizer, 0)
    masters, saved = optimizer.gathered_masters(), optimizer.state_dict()
    for group, other in zip(optimizer.param_groups, ("full", "compact"), strict=True):
        chosen, group["state"] = group["state"], other
        for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
            with pytest.raises(ValueError, match=rf"'state'\] was .* when .* built and is '{other}' now"):
                call()
        group["state"] = chosen
    assert_all_equal(optimizer.gathered_masters(), masters, "master")
    optimizer.step()


@pytest.mark.parametrize(("dtype", "state"), [(torch.bfloat16, "compact"), (torch.float32, "full")])
def test_a_written_parameter_that_is_its_own_master(device, dtype, state):
    """A state dict that was not saved is that memory, and accepts what is in it: accelerate loads one once it
    has wrapped the model, and DDP has written to all parameters. An NVFP4 weight is made from its master.
    """
    p = nn.Parameter(torch.randn(4, 64, device=device).to(dtype))
    q = nn.Parameter(zerofp4.quantize(torch.randn(16, 64, device=device)))
    optimizer = build([p, q], state=state)
    take_step([p, q], optimizer, 0)
    saved, before, codes = copy.deepcopy(optimizer.state_dict()), p.detach().clone(), q.rowwise_data.clone()
    with torch.no_grad():
        p.zero_()
        q.zero_()
    with pytest.raises(RuntimeError, match=r"written to .* before the optimizer loads a checkpoint"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not p.any()
    assert_bytes_equal(q.rowwise_data, codes, "codes")
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert_bytes_equal(p.detach(), before, "parameter")
    optimizer.step()


def test_each_master_of_24_bits_is_converted_once(monkeypatch):
    """By an export, and by an optimizer that takes over: one after the other, none of them stays in FP32."""
    model = nn.Sequential(*(nn.Linear(64, 8, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    optimizer, made = build(model.parameters()), []

    def join(*planes):
        assert not any(ref() is not None for ref in made[:-1])
        values = joined(*planes)
        made.append(weakref.ref(values))
        return values

    monkeypatch.setattr("zerofp4.optim.state_dict.joined", join)
    dict(zerofp4.master_state_dict(model, optimizer, torch.bfloat16))
    assert len(made) == 3
    made.clear()
    build(model.parameters(), masters_from=optimizer)
    assert len(made) == 3
