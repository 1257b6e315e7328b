"""Casts into TransformerEngine's NVFP4 tensors, which a stand-in with their attributes takes the place of."""

from __future__ import annotations

import copy
import dataclasses
import re
import weakref

import pytest
import torch
from cases import te_stand_in
from cases.transformer_engine import check, check_untouched, contents, make, places
from helpers import assert_bytes_equal, collect_garbage, needs_gpu

import zerofp4
import zerofp4.integrations.transformer_engine
from zerofp4.cast import function as cast_function

cast = zerofp4.cast_master_weights_to_nvfp4


def complete(weights, masters, starts, **options) -> None:
    cast(weights, masters, starts, **options)
    zerofp4.all_gather_nvfp4(weights, starts, [master.numel() for master in masters])
    zerofp4.post_all_gather_processing(weights)


# Bytes


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_buffer_is_written_in_place(device, dtype, columnwise):
    weights, masters, starts = make(device, dtype=dtype, columnwise=columnwise)
    before = places(weights)
    for _ in range(3):
        complete(weights, masters, starts)
        check(weights, masters)
        masters = [master.sin() * 5 for master in masters]
    assert places(weights) == before
    assert all((weight._columnwise_data is not None) == columnwise for weight in weights)


def test_weights_of_both_kinds_in_one_list(device):
    theirs, masters, starts = make(device, [(48, 288), (16, 16)])
    ours = [zerofp4.empty((48, 288), device=device), zerofp4.empty((32, 32), device=device)]
    masters += [masters[0].neg(), torch.randn(1024, device=device)]
    complete([*theirs, *ours], masters, [*starts, 0, 0])
    check(theirs, masters[:2])
    expected = zerofp4.quantize(masters[2].view(48, 288).bfloat16(), columnwise=True)
    assert_bytes_equal(ours[0].rowwise_data, expected.rowwise_data, "codes")
    assert_bytes_equal(ours[0].columnwise_data, expected.columnwise_data, "columnwise codes")


# Calls like the last one, and buffers that were exchanged


def test_a_call_like_the_last_one_is_not_checked_again(device, monkeypatch):
    calls = []
    original = cast_function.check_request
    monkeypatch.setattr(cast_function, "check_request", lambda *a: (calls.append(1), original(*a))[1])
    weights, masters, starts = make(device, [(48, 288), (16, 16)])
    for _ in range(3):
        masters[0].neg_()
        cast(weights, masters, starts)
    assert len(calls) == 1
    check(weights, masters, columnwise_codes=False)


NAMES = te_stand_in.BUFFERS


def exchange(weight, name) -> torch.Tensor:
    """Another buffer in the place of one; returns that."""
    old = getattr(weight, name)
    setattr(weight, name, torch.full_like(old, 0x5A))
    return old


def exchange_memory(weight, name) -> torch.Tensor:
    """Behind the buffer."""
    buffer = getattr(weight, name)
    old = buffer.detach()
    buffer.data = torch.full_like(old, 0x5A)
    return old


@pytest.mark.parametrize("how", [exchange, exchange_memory])
@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_was_exchanged_is_found_by_the_functions(device, name, how):
    weights, masters, starts = make(device, [(48, 288), (16, 16)])
    complete(weights, masters, starts)
    old = how(weights[1], name)
    kept = old.clone()
    masters = [master * 2 for master in masters]
    complete(weights, masters, starts)
    check(weights, masters)
    assert_bytes_equal(old, kept, "a buffer that the weight has no more")


@pytest.mark.parametrize("how", [exchange, exchange_memory])
@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_was_exchanged_stops_a_plan(device, name, how):
    weights, masters, starts = make(device, [(48, 288), (16, 16)])
    plan = zerofp4.CastPlan(weights, masters, starts)
    plan.step()
    plan.post()
    old = how(weights[1], name)
    kept, before = old.clone(), contents(weights)
    masters[0].neg_()
    for call in (plan.step, plan.post, plan.check):
        with pytest.raises(RuntimeError, match=r"model_weights\[1\].* has moved"):
            call()
    check_untouched(weights, before)
    assert_bytes_equal(old, kept, "a buffer that the weight has no more")
    plan.refresh()
    plan.step()
    plan.post()
    check(weights, masters)


def test_columnwise_buffers_that_were_freed_and_made_anew(device):
    weights, masters, starts = make(device, [(48, 288), (16, 16), (32, 48)])
    complete(weights, masters, starts)
    for i in (1, 0):
        weights[i].update_usage(rowwise_usage=True, columnwise_usage=False)
        complete(weights, masters, starts)
        assert weights[i]._columnwise_data is None
        check(weights, masters)
    others = te_stand_in.make((16, 16), device=device)
    for name in te_stand_in.COLUMNWISE:
        setattr(weights[1], name, getattr(others, name))
    masters = [master * 2 for master in masters]
    complete(weights, masters, starts)
    check(weights, masters)


# What is refused


def asks(name, value=True):
    return lambda w: setattr(w, "_quantizer", dataclasses.replace(w._quantizer, **{name: value}))


def buffer(name, change):
    return lambda w: setattr(w, name, change(getattr(w, name)))


def given(name, value=True):
    return lambda w: setattr(w, name, value)


REFUSED = [
    (given("_nvfp4_use_4over6"), ValueError, "_nvfp4_use_4over6 asks for four over six"),
    (given("_with_gemm_swizzled_scales"), ValueError, "_with_gemm_swizzled_scales asks for scales that are"),
    (given("_row_scaled_nvfp4"), ValueError, "_row_scaled_nvfp4 asks for an amax"),
    (asks("with_2d_quantization", False), ValueError, "_quantizer.with_2d_quantization must be"),
    (given("_quantizer", None), ValueError, "_quantizer is None"),
    (given("_quantizer", object()), TypeError, "object has no attribute _quantizer.with_2d"),
    (given("_rowwise_data", None), ValueError, "_rowwise_data is None"),
    (
        lambda w: [setattr(w, name, None) for name in te_stand_in.ROWWISE],
        ValueError,
        "_rowwise_data is None: there is nothing to cast into",
    ),
    *(
        (given(name, None), ValueError, f"{name} is None, but _.*_data is not")
        for name in NAMES
        if not name.endswith("_data")
    ),
    (given("_columnwise_data", None), ValueError, "_columnwise_data is None, but _col"),
    *(
        (lambda w, name=name: delattr(w, name), TypeError, f"NVFP4Tensor has no attribute {name}")
        for name in (*NAMES, "_with_gemm_swizzled_scales", "_quantizer")
    ),
    *((buffer(name, lambda b: b.view(torch.int8)), TypeError, f"{name} must be a torch.") for name in NAMES),
    *(
        (buffer(name, lambda b: b.new_empty((b.shape[0] + 1, *b.shape[1:]))), ValueError, f"{name} must have")
        for name in NAMES
    ),
    (
        buffer("_rowwise_scale_inv", lambda b: b[:, :18].contiguous()),
        ValueError,
        r"_rowwise_scale_inv must have shape \(128, 20\), got \(128, 18\)",
    ),
    (
        buffer("_columnwise_data", lambda b: b.new_empty(b.shape[::-1]).t()),
        ValueError,
        "_columnwise_data must be contiguous",
    ),
    (buffer("_columnwise_scale_inv", lambda b: b.to("meta")), ValueError, "_columnwise_scale_inv must be on"),
    (
        lambda w: w._rowwise_scale_inv.untyped_storage().resize_(7),
        RuntimeError,
        "_rowwise_scale_inv needs .* bytes of its storage, which has 7",
    ),
    (given("_amax_rowwise", [1.0]), TypeError, "_amax_rowwise must be a torch.float32 tensor"),
]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_cannot_be_cast_into_is_refused_by_name(device, change, error, message, known):
    """Also of weights that a cast has written, and by every function."""
    weights, masters, starts = make(device, [(16, 16), (48, 288)])
    if known:
        complete(weights, masters, starts)
    before = contents(weights[:1])
    change(weights[1])
    message = rf"model_weights\[1\]: {message}"
    for call in (
        lambda: cast(weights, [-master for master in masters], starts),
        lambda: zerofp4.CastPlan(weights, masters, starts),
        lambda: zerofp4.all_gather_nvfp4(weights, starts, [master.numel() for master in masters]),
        lambda: zerofp4.post_all_gather_processing(weights),
    ):
        with pytest.raises(error, match=message):
            call()
    check_untouched(weights[:1], before)


@pytest.mark.parametrize("shape", [(32, 24), (40, 32), (2, 16, 16)])
def test_a_shape_that_transformer_engine_does_not_cast_is_refused(shape):
    weight = te_stand_in.make((32, 16))
    other = te_stand_in.NVFP4Tensor(
        te_stand_in.buffers_of(weight), shape, torch.bfloat16, "cpu", weight._quantizer
    )
    with pytest.raises(ValueError, match=rf"model_weights\[0\]: shape must be two.*{re.escape(str(shape))}"):
        cast([other], [torch.zeros(4)], [0])


def test_without_the_adapter_the_error_names_it(monkeypatch):
    monkeypatch.setattr("zerofp4.storage.record.adapters", [])
    weights, masters, starts = make("cpu", [(16, 16)])
    message = r"must be an NVFP4Tensor, got cases.te_stand_in.NVFP4Tensor: .* zerofp4.integrations"
    with pytest.raises(TypeError, match=message):
        cast(weights, masters, starts)


def test_tensors_of_2_14_have_no_later_attributes(device):
    weights, masters, starts = make(device, [(48, 288)])
    del weights[0]._row_scaled_nvfp4, weights[0]._nvfp4_use_4over6, weights[0]._nvfp4_e4m3_max
    complete(weights, masters, starts)
    check(weights, masters)


# Lives


def test_a_weight_dies_although_plans_are_kept_with_it():
    weights, masters, starts = make("cpu", [(48, 288), (16, 16)])
    complete(weights, masters, starts)
    alive = [weakref.ref(weight) for weight in weights]
    del weights
    collect_garbage()
    assert [ref() for ref in alive] == [None, None]


def test_a_copy_of_what_is_kept_with_a_tensor_has_no_record():
    (weight,), masters, starts = make("cpu", [(16, 16)])
    complete([weight], masters, starts)
    copied = te_stand_in.make((16, 16))
    vars(copied).update(copy.deepcopy(vars(weight)))
    complete([copied], [-masters[0]], starts)
    check([weight, copied], [masters[0], -masters[0]])


@needs_gpu
def test_a_captured_step_writes_the_buffers():
    weights, masters, starts = make(torch.device("cuda", torch.cuda.current_device()))
    complete(weights, masters, starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cast(weights, masters, starts)
        zerofp4.post_all_gather_processing(weights)
    for _ in range(2):
        for master in masters:
            master.mul_(-1.5)
        graph.replay()
        check(weights, masters)
