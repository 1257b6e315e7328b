"""FusedAdamW(state="compact") is reference.compact_adamw_step bit for bit, also loaded and offered a plan. So
is ZeroFP4Optimizer in distributed/optim/test_reference_step; here is what that keeps and hands over.
"""

import math

import pytest
import torch
from cases.optim import assert_all_equal, make_parameters, take_step, through_a_file
from distributed.optim.fused_cases import (
    COMPACT_STATE,
    OPTIONS,
    STATE,
    Expected,
    is_compact,
    set_random_gradients,
    step_alike,
)
from torch import nn

import zerofp4
from zerofp4 import reference
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

SHAPES = [(40, 192), (3, 20, 65), (300,), (7, 63), (1, 64), (5, 128), (2, 1, 4, 70), ()]
"""Compact but for those of one dimension or with short rows."""


def parameters(device, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def compact(params, **options):
    return FusedAdamW(params, **OPTIONS, **options, state="compact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maximize", [False, True])
def test_equals_the_reference_and_groups_choose(device, dtype, maximize):
    """Large parameters and small ones, with gradients that come and go; in an added group, too."""
    params, beside = parameters(device), parameters(device, [(4, 64)] * 2)
    groups = [{"params": beside[:1], "state": "full"}, {"params": params, "lr": 0.5}]
    optimizer = compact(groups, maximize=maximize)
    optimizer.add_param_group({"params": beside[1:], "state": "full"})
    expected = Expected(optimizer)
    expected.compare_steps(
        range(4), lambda step, i, p: torch.randn_like(p).to(dtype) if (i + step) % 4 or i < 2 else None
    )
    assert expected.compact == [False, *map(is_compact, params), False]


# State dicts


def trained(device, steps=3, **options):
    params = parameters(device)
    optimizer = FusedAdamW(params, **OPTIONS, **options)
    for _ in range(steps):
        set_random_gradients(params)
        optimizer.step()
    return optimizer, params


def test_a_state_dict_has_what_is_kept(device):
    """torch casts what it loads to the dtype of a parameter; codes stay what they are."""
    optimizer, params = trained(device, state="compact")
    twin, copies = trained(device, 1, state="compact")
    saved, kept = through_a_file(optimizer.state_dict()), []
    twin.register_load_state_dict_pre_hook(lambda _, given: kept.append(given["state"][0]["scales"].dtype))
    saved["state"][0]["step"] = int(saved["state"][0]["step"])  # as some write it
    twin.load_state_dict(saved)
    assert kept == [torch.float32]
    step_alike(optimizer, params, twin, copies)
    assert_all_equal(copies, params, "parameter")
    for p, q in zip(params, copies, strict=True):
        assert optimizer.state[p].keys() == twin.state[q].keys()
        assert_all_equal(twin.state[q].values(), optimizer.state[p].values(), "entry")


@pytest.mark.parametrize("exponent", [-149, -100, -20, 0, 60, 100, 127, None])
def test_moments_of_any_size_become_codes_and_come_back(device, monkeypatch, exponent):
    """Groups whose largest magnitude has this exponent, or any bits: Inf, NaN and subnormal numbers too, some
    rows after the others.
    """
    generator = torch.Generator().manual_seed(0)
    if exponent is None:
        drawn = torch.randint(-(2**31), 2**31, (2, 8, 200), generator=generator).int().view(torch.float32)
        monkeypatch.setattr("zerofp4.optim.moments.CHUNK", 3 * 200)
    else:
        drawn = torch.randn(2, 8, 200, generator=generator) * 2.0**exponent
    first, second = drawn[0], drawn[1].abs()
    p, empty = (torch.zeros(rows, 200, device=device) for rows in (8, 0))  # a rank of FSDP2 may have that
    there, back = compact([p, empty]), FusedAdamW([p, empty], **OPTIONS)
    state = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}
    states = {0: state, 1: state | {"exp_avg": first[:0], "exp_avg_sq": first[:0]}}
    there.load_state_dict({"state": states, "param_groups": there.state_dict()["param_groups"]})
    back.load_state_dict(there.state_dict())
    codes = reference.encode_moments(first, reference.root(second).clamp(max=2.0**64))
    decoded = [moment.masked_fill(moment.isnan(), math.nan) for moment in reference.decode_moments(codes)]
    for one, names, moments in ((there, COMPACT_STATE, codes), (back, STATE, decoded)):
        assert one.state[p].keys() == {"step", *names} and one.state[p]["step"] == 1
        found = [one.state[p][name].cpu() for name in names]
        if one is back:  # a GPU's sums have NaN of other bits
            found = [moment.masked_fill(moment.isnan(), math.nan) for moment in found]
        assert_all_equal(found, moments, "moment")


# What is refused


@pytest.mark.parametrize("state", ["full", "compact"])
def test_a_choice_that_is_changed_later(device, state):
    """Only a load converts what is kept."""
    optimizer, params = trained(device, state=state)
    set_random_gradients(params)
    before, group = [p.clone() for p in params], optimizer.param_groups[0]
    group["state"] = "full" if state == "compact" else "compact"
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\['state'\] is '.*' now, and that of param_groups\[0\].* not"):
            optimizer.step()
    assert_all_equal(params, before, "parameter")
    optimizer.load_state_dict(optimizer.state_dict())
    assert ("scales" in optimizer.state[params[0]]) == (state == "full")
    optimizer.step()


def test_scales_that_lie_between_two_pairs(device):
    """As in a checkpoint that is one flat tensor, behind a step count."""
    given, _ = trained(device, 1, state="compact")
    optimizer, params = trained(device, 1, state="compact")
    saved = given.state_dict()
    scales = saved["state"][0]["scales"]
    flat = torch.cat((torch.ones(1, device=device), scales.flatten()))
    saved["state"][0]["scales"] = flat[1:].view_as(scales)
    optimizer.load_state_dict(saved)
    set_random_gradients(params)
    before = [p.clone() for p in params]
    with pytest.raises(ValueError, match=r"param_groups\[0\].* scales must begin at a multiple of 8 bytes"):
        optimizer.step()
    assert_all_equal(params, before, "parameter")


# ZeroFP4Optimizer

SPECIFICATIONS = [
    ((34, 128), torch.bfloat16, True),
    ((40, 130), torch.bfloat16, True),
    ((16, 192), torch.float32, True),
    ((34, 66), torch.float16, True),
    ((3, 18, 96), torch.bfloat16, True),
    ((300,), torch.bfloat16, False),
    ((30, 65), torch.bfloat16, False),
    ((9, 256), torch.float32, False),
    ((7, 80), torch.float16, False),
    ((2, 9, 128), torch.bfloat16, False),
    ((5, 3), torch.bfloat16, False),
    ((), torch.float32, False),
]
"""Masters of 24 bits and of 32, full state beside compact, rows that groups divide and that they do not."""


def test_what_is_kept():
    """5.1 bytes for each element, and 3 of the master, of which two are those of a bf16 weight."""
    p = nn.Parameter(zerofp4.quantize(torch.randn(64, 1024, dtype=torch.bfloat16)))
    q = nn.Parameter(torch.randn(64, 1024, dtype=torch.bfloat16))
    optimizer = ZeroFP4Optimizer([p, q], FusedAdamW, state="compact")
    take_step([p, q], optimizer, 0)
    for weight in (p, q):
        size = sum(piece.values.nbytes for piece in optimizer.state[weight].values())
        assert size == 5 * weight.numel() + weight.numel() // 8 + 4
    assert optimizer.state[q]["master_high"].values.data_ptr() == q.data_ptr()


def test_groups_beside_another_class(device):
    """All are updated at once then, with the same bytes."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    models = []
    for beside in (False, True):
        params, sgd = (
            make_parameters(device, 0, SPECIFICATIONS),
            nn.Parameter(torch.ones(6, 64, device=device)),
        )
        groups = [{"params": part, "state": "compact"} for part in (params[:4], params[4:])]
        groups += [
            {"params": [sgd], "optimizer_class": torch.optim.SGD, "lr": 0.5, "weight_decay": 0.0}
        ] * beside
        optimizer = ZeroFP4Optimizer(groups, FusedAdamW, **OPTIONS)
        assert (optimizer.describe()["obstacle"] is not None) == beside
        for step in range(3):
            sgd.grad = torch.ones_like(sgd)
            take_step(params, optimizer, step)
        models.append([piece.values for p in params for piece in optimizer.state[p].values()])
    assert_all_equal(*models, "state")
    assert (sgd == -0.5).all()


def test_masters_move_between_optimizers(device):
    """Those of 24 bits stay what they are in 32 bits, and come back so, also by a load. Exports have them."""
    parameters = make_parameters(device, 0, SPECIFICATIONS)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, state="compact", **OPTIONS)
    take_step(parameters, optimizer, 0)
    masters = optimizer.gathered_masters()
    exported = dict(zerofp4.master_state_dict(nn.ParameterList(parameters), optimizer, torch.bfloat16))
    assert_all_equal(exported.values(), [master.bfloat16() for master in masters], "exported")
    for state in ("full", "compact"):
        saved = optimizer.state_dict()
        optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, state=state, masters_from=optimizer, **OPTIONS)
        assert_all_equal(optimizer.gathered_masters(), masters, state)
        optimizer.load_state_dict(saved)
        assert_all_equal(optimizer.gathered_masters(), masters, state)


@pytest.mark.parametrize(("dtype", "state"), [(torch.bfloat16, "compact"), (torch.float32, "full")])
def test_a_state_dict_that_was_not_saved_has_what_was_written(device, dtype, state):
    """accelerate loads one once it has wrapped the model, and DDP has written to all parameters."""
    p = nn.Parameter(torch.randn(4, 64, device=device).to(dtype))
    optimizer = ZeroFP4Optimizer([p], FusedAdamW, state=state)
    take_step([p], optimizer, 0)
    with torch.no_grad():
        p.zero_()
    with pytest.raises(RuntimeError, match=r"written to .* before the optimizer loads a checkpoint"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not p.any()
    optimizer.step()
