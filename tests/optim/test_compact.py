"""FusedAdamW(state="compact") is reference.compact_adamw_step bit for bit, also loaded and offered a plan."""

import copy
import math
import re

import pytest
import torch
from cases.optim import assert_all_equal, through_a_file
from distributed.optim.fused_cases import (
    COMPACT_STATE,
    OPTIONS,
    STATE,
    Expected,
    is_compact,
    set_random_gradients,
    step_alike,
)

import zerofp4
from zerofp4 import reference
from zerofp4.optim import FusedAdamW

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


def test_a_plan_with_other_rows():
    master = torch.zeros(16, 128)
    plan = zerofp4.CastPlan([zerofp4.empty((32, 64))], [master.view(-1)], [0])
    optimizer = compact([master])
    optimizer.offer_amaxes(plan)
    with pytest.raises(ValueError, match="has compact state by rows of 128, which the weight has not"):
        optimizer.step()


# State dicts


def trained(device, steps=3, **options):
    params = parameters(device)
    optimizer = FusedAdamW(params, **OPTIONS, **options)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
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
def test_moments_of_any_size_become_codes_and_come_back(device, exponent):
    """Groups whose largest magnitude has this exponent, or any bits: Inf, NaN and subnormal numbers too."""
    generator = torch.Generator().manual_seed(0)
    if exponent is None:
        drawn = torch.randint(-(2**31), 2**31, (2, 8, 200), generator=generator).int().view(torch.float32)
    else:
        drawn = torch.randn(2, 8, 200, generator=generator) * 2.0**exponent
    first, second = drawn[0], drawn[1].abs()
    p = torch.zeros(8, 200, device=device)
    there, back = compact([p]), FusedAdamW([p], **OPTIONS)
    state = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}
    there.load_state_dict({"state": {0: state}, "param_groups": there.state_dict()["param_groups"]})
    back.load_state_dict(there.state_dict())
    codes = reference.encode_moments(first, reference.root(second).clamp(max=2.0**64))
    decoded = [moment.masked_fill(moment.isnan(), math.nan) for moment in reference.decode_moments(codes)]
    for one, names, moments in ((there, COMPACT_STATE, codes), (back, STATE, decoded)):
        assert one.state[p].keys() == {"step", *names} and one.state[p]["step"] == 1
        found = [one.state[p][name].cpu() for name in names]
        if one is back:  # a GPU's sums have NaN of other bits
            found = [moment.masked_fill(moment.isnan(), math.nan) for moment in found]
        assert_all_equal(found, moments, "moment")


def test_large_state_is_converted_in_parts(device, monkeypatch):
    saved, _ = trained(device)
    given, found = saved.state_dict(), []
    for most in (None, 1000):
        if most is not None:
            monkeypatch.setattr("zerofp4.optim.moments.MOST", most)
        there, back = compact(parameters(device)), FusedAdamW(parameters(device), **OPTIONS)
        there.load_state_dict(given)
        back.load_state_dict(there.state_dict())
        kept = [*there.state.values(), *back.state.values()]
        found.append([value for entries in kept for value in entries.values()])
    assert_all_equal(*found, "entry")


def test_a_state_that_is_replaced_is_not_kept():
    p = torch.randn(1000)
    optimizer = FusedAdamW([p])
    set_random_gradients([p])
    optimizer.step()
    old = torch.utils.weak.WeakTensorKeyDictionary({optimizer.state[p]["exp_avg"]: 0})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not len(old)


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


@pytest.mark.parametrize(
    ("state", "name", "change", "message"),
    [
        ("full", "exp_avg", torch.t, "must have shape (40, 192), got (192, 40)"),
        ("compact", "exp_avg_sq_codes", torch.Tensor.short, "must be a torch.uint8 tensor, got torch.int16"),
        ("compact", "scales", torch.flatten, "must have shape (40, 3, 2), got (240,)"),
    ],
)
@pytest.mark.parametrize("loader", ["full", "compact"])
def test_loaded_state_of_other_shapes_and_dtypes(device, state, name, change, message, loader):
    given, _ = trained(device, 1, state=state)
    optimizer, _ = trained(device, 1, state=loader)
    before, saved = optimizer.state, given.state_dict()
    saved["state"][0][name] = change(saved["state"][0][name])
    error = TypeError if "tensor" in message else ValueError
    with pytest.raises(error, match=re.escape(f"{name} in the state of AdamW {message}")):
        optimizer.load_state_dict(saved)
    assert optimizer.state is before


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


@pytest.mark.parametrize("saver", ["full", "compact"])
def test_a_converted_state_is_its_own(device, saver):
    """Also of a parameter without elements, as a rank of fully_shard may have it."""
    params = [torch.randn(4, 64, device=device), torch.randn(0, 64, device=device)]
    saved = FusedAdamW(params, state=saver, **OPTIONS)
    set_random_gradients(params)
    saved.step()
    copies = [p.clone() for p in params]
    loaded = FusedAdamW(copies, state="compact" if saver == "full" else "full", **OPTIONS)
    loaded.load_state_dict(saved.state_dict())
    saved.step()
    for step in (1, 2):
        assert [loaded.state[p]["step"].item() for p in copies] == [step, step]
        set_random_gradients(copies)
        loaded.step()
