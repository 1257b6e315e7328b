"""The function that finds its plan: calls like the last one are not checked again, all others are."""

from __future__ import annotations

import types
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from cases.cast import check, check_kinds, make
from helpers import assert_bytes_equal, collect_garbage

import zerofp4
from zerofp4.cast import function as cast_function
from zerofp4.cast import gather

cast = zerofp4.cast_master_weights_to_nvfp4


@pytest.fixture
def checks(monkeypatch):
    """Counts the calls that were checked."""
    count = types.SimpleNamespace(cast=0, weights=0)

    def counted(name, function):
        def call(*args):
            setattr(count, name, getattr(count, name) + 1)
            return function(*args)

        return call

    monkeypatch.setattr(cast_function, "check_request", counted("cast", cast_function.check_request))
    monkeypatch.setattr(gather, "check_weights", counted("weights", gather.check_weights))
    return count


def test_a_call_like_the_last_one_is_not_checked_again(device, checks):
    weights, masters, starts = make(device)
    groups, found_inf = [[weights[0], weights[1]]], torch.zeros(1, device=device)
    for options in ({}, {"amax_groups": groups}, {"found_inf": found_inf}, {"on_nonfinite": "raise"}):
        cast(weights, masters, starts, **options)
        checks.cast = 0
        for _ in range(2):
            masters[0].mul_(-1.5)
            cast(weights, masters, starts, **options)
        assert checks.cast == 0
    check(weights, masters)
    # Other objects that say the same: wrappers of the same records, views of the same masters, tuples.
    cast(tuple(w.detach() for w in weights), tuple(m[:] for m in masters), (0, 0), on_nonfinite="raise")
    assert checks.cast == 0
    cast(weights, [m.clone() for m in masters], starts, on_nonfinite="raise")
    assert checks.cast == 1
    parameters = [torch.nn.Parameter(master) for master in masters]
    for _ in range(3):
        cast(weights, parameters, starts, on_nonfinite="raise")
    assert checks.cast == 2
    check(weights, masters)


def test_gathers_and_transposes_like_the_last_one_are_not_checked_again(device, checks):
    weights, masters, starts = make(device)
    for _ in range(3):
        cast(weights, masters, starts)
        zerofp4.all_gather_nvfp4(weights, starts, [m.numel() for m in masters])
        zerofp4.post_all_gather_processing(weights)
        assert checks.weights == 2
        check_kinds(weights, masters)
        masters = [torch.randn_like(master) for master in masters]
    weights[1].rowwise_data = weights[1].rowwise_data.clone()
    cast(weights, masters, starts)
    zerofp4.post_all_gather_processing(weights)
    assert checks.weights == 3 and len(weights[0].record.attachments["post_plans"]) == 1
    check_kinds(weights, masters)


class Subclass(torch.Tensor):
    pass


def master(change):
    return lambda masters: {"master_weights": [masters[0], change(masters[1])]}


def given(**options):
    return lambda masters: options


OTHER = zerofp4.empty((16, 16))
BAD = {
    "other dtype": (master(lambda m: m.view(torch.int32)), TypeError, "must be a float32 or bfloat16"),
    "subclass": (master(lambda m: m.view(torch.int32).as_subclass(Subclass)), TypeError, "must be a float32"),
    "not contiguous": (master(lambda m: m.as_strided((256,), (2,))), ValueError, "must be contiguous"),
    "matrix": (master(lambda m: m.view(16, 16)), ValueError, "must be one-dimensional"),
    "column": (master(lambda m: m.view(256, 1)), ValueError, "must be one-dimensional"),
    "longer": (master(lambda m: m.as_strided((257,), (1,))), ValueError, "exceeds weight"),
    "none": (master(lambda m: None), ValueError, r"master_weights\[1\] is None, but start_offsets"),
    "no tensor": (master(lambda m: types.SimpleNamespace(dtype=m.dtype)), TypeError, "must be a float32"),
    "address": (master(lambda m: m.data_ptr()), TypeError, "must be a float32"),
    "offset true": (given(start_offsets=[0, False]), TypeError, "must be an int or None, got bool"),
    "offset float": (given(start_offsets=[0, 0.0]), TypeError, "must be an int or None, got float"),
    "offset none": (given(start_offsets=[0, None]), ValueError, r"start_offsets\[1\] is None"),
    "offset negative": (given(start_offsets=[0, -1]), ValueError, "must not be negative, got -1"),
    "fewer masters": (lambda m: {"master_weights": m[:1]}, ValueError, "master_weights has 1 entries for 2"),
    "offset": (given(start_offsets=[0, 2]), ValueError, "exceeds weight"),
    "fewer offsets": (given(start_offsets=[0]), ValueError, "start_offsets has 1 entries"),
    "offsets array": (given(start_offsets=torch.zeros(2).long()), TypeError, "must be a list or tuple"),
    "policy": (given(on_nonfinite="Skip"), ValueError, "on_nonfinite must be one of"),
    "manual": (given(manual_post_all_gather_processing=False), ValueError, "call post_all_gather_processing"),
    "found_inf shape": (
        lambda m: {"found_inf": m[0].new_zeros(2)},
        ValueError,
        r"found_inf must have shape \(1,\)",
    ),
    "found_inf dtype": (lambda m: {"found_inf": m[0].new_zeros(1).int()}, TypeError, "found_inf must be"),
    "groups": (given(amax_groups=3), TypeError, "amax_groups must be a list"),
    "group of others": (given(amax_groups=[[OTHER]]), ValueError, "is not one of the quantized weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_although_the_last_call_was_good(device, case):
    """By a plan, too."""
    weights, _, starts = make(device)
    room = torch.randn(34 * 288 + 512, device=device)
    masters = [room[: 34 * 288], room[34 * 288 :][:256]]
    change, error, message = BAD[case]
    arguments = {"model_weights": weights, "master_weights": masters, "start_offsets": starts}
    cast(**arguments)
    before = [weight.rowwise_data.clone() for weight in weights]
    masters[0].neg_()
    for _ in range(2):
        with pytest.raises(error, match=message):
            cast(**arguments | change(masters))
    if case != "manual":
        with pytest.raises(error, match=message):
            zerofp4.CastPlan(**arguments | change(masters))
    for weight, codes in zip(weights, before, strict=True):
        assert_bytes_equal(weight.rowwise_data, codes, "codes")
    cast(**arguments)
    check(weights, masters)


def test_an_empty_master_of_another_device_is_refused():
    weights, masters, starts = make("cpu")
    masters[1] = torch.zeros(0)
    cast(weights, masters, starts)
    with pytest.raises(ValueError, match="is on meta"):
        cast(weights, [masters[0], masters[1].to("meta")], starts)
    cast(weights, masters, starts)
    check(weights[:1], masters[:1])


def test_bad_weights_are_refused_although_the_last_call_was_good():
    weights, masters, starts = make("cpu", ((16, 16), (16, 16)))
    cast(weights, masters, starts)
    lookalike = types.SimpleNamespace(record=weights[1].record)
    for bad, error, message in (
        ([weights[0], lookalike], TypeError, "must be an NVFP4Tensor, got SimpleNamespace"),
        ([weights[0], weights[0]], ValueError, "is the same weight as"),
        (weights[:1], ValueError, "has 2 entries for 1 model_weights"),
        ([weights[0], torch.zeros(16, 16)], TypeError, "must be an NVFP4Tensor, got Tensor"),
    ):
        for call in (cast, zerofp4.CastPlan):
            with pytest.raises(error, match=message):
                call(bad, masters, starts)
    weights[1].rowwise_data = weights[0].rowwise_data
    for call in (lambda: cast(weights, masters, starts), lambda: zerofp4.post_all_gather_processing(weights)):
        with pytest.raises(ValueError, match="has the same rowwise_data as"):
            call()


def test_an_amax_group_changed_in_place_counts():
    weights, masters, starts = make("cpu", ((16, 16), (16, 16), (16, 16)))
    masters[2].mul_(100)
    members = [weights[0], weights[1]]
    for _ in range(2):
        cast(weights, masters, starts, amax_groups=[members])
    members[1] = weights[2]
    cast(weights, masters, starts, amax_groups=[members])
    assert weights[0].amax == weights[2].amax != weights[1].amax
    members[1] = zerofp4.empty((16, 16))
    with pytest.raises(ValueError, match="is not one of the quantized weights: groups from before"):
        cast(weights, masters, starts, amax_groups=[members])
    split = [[weights[0], weights[1]], [weights[2]]]
    cast(weights, masters, starts, amax_groups=split)
    split[1].append(split[0].pop())  # the same members in a row, cut elsewhere
    cast(weights, masters, starts, amax_groups=split)
    assert weights[1].amax == weights[2].amax != weights[0].amax


def test_found_inf_of_each_call(device):
    weights, masters, starts = make(device)
    flags = [torch.zeros(1, device=device) for _ in range(3)]
    masters[0][0] = torch.nan
    for flag in (*flags, flags[0], None, flags[0]):
        for other in flags:
            other.zero_()
        for _ in range(2):
            cast(weights, masters, starts, found_inf=flag)
        assert [other.item() for other in flags] == [float(other is flag) for other in flags]


def test_a_call_after_one_that_could_not_take_addresses_uses_its_own_masters(device, monkeypatch):
    """The plan has been left with some of the addresses of the failed call, and with none of its masters."""
    weights, masters, starts = make(device)
    cast(weights, masters, starts)
    others = [torch.randn_like(master) for master in masters]
    with monkeypatch.context() as patched:
        patched.setattr(zerofp4.ops.PostStage, "bind", mock.Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            cast(weights, others, starts)
    left = [weakref.ref(other) for other in others]
    del others
    collect_garbage()
    assert [other() for other in left] == [None] * len(left)
    for _ in range(2):
        masters[0].mul_(-1.5)
        cast(weights, masters, starts)
        check(weights, masters)


def test_a_repeated_call_keeps_no_master_alive():
    weights, masters, starts = make("cpu")
    owner = np.ones(256, dtype=np.float32)
    alive = weakref.ref(owner)
    masters[1] = torch.from_numpy(owner)
    del owner
    for _ in range(3):
        cast(weights, masters, starts)
    assert alive() is not None
    del masters
    assert alive() is None


def exchanged(codes):
    codes.data = codes.clone()


def resized(codes):
    codes.untyped_storage().resize_(1 << 20)


@pytest.mark.parametrize("move", [exchanged, resized])
@pytest.mark.parametrize("call", ["cast", "gather", "post"])
def test_codes_moved_behind_the_record_are_noticed(device, checks, move, call):
    weights, masters, starts = make(device)
    numels = [master.numel() for master in masters]
    calls = {
        "cast": lambda: cast(weights, masters, starts),
        "gather": lambda: zerofp4.all_gather_nvfp4(weights, starts, numels),
        "post": lambda: zerofp4.post_all_gather_processing(weights),
    }
    for function in calls.values():
        function()
    fast = (checks.cast, checks.weights)
    masters[1].neg_()
    if call == "post":
        cast(weights, masters, starts)
    before = weights[1].rowwise_data.data_ptr()
    move(weights[1].rowwise_data)
    assert weights[1].rowwise_data.data_ptr() != before
    calls[call]()
    assert (checks.cast, checks.weights) == (fast[0] + (call == "cast"), fast[1] + (call != "cast"))
    calls["cast"]()
    calls["post"]()
    check_kinds(weights, masters)
