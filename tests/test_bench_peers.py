"""What scripts/bench.py compares with: the reference does our work, and how packages are called."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from benchmarking import rules
from benchmarking.clock import Clock
from benchmarking.operations import inputs, outside, peers
from benchmarking.operations.hadamard import block_diagonal
from benchmarking.operations.quantize import RHT
from benchmarking.operations.swizzle import reference_swizzle
from benchmarking.session import Session
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch):
    monkeypatch.setattr(Clock, "copy_gbps", lambda self: 10.0)


@pytest.fixture
def given():
    return inputs.make_input(Session("quantize", CPU, 1, with_profile=False), (64, 96))


def test_the_reference_that_is_compiled_quantizes_as_we_do(given):
    for block in (inputs.ACTIVATION, inputs.WEIGHT):
        ours = zerofp4.quantize(given.x, block=block)
        codes, scale = peers.quantize(given.x, given.amax, block[0])
        assert_bytes_equal(ours.rowwise_data, codes, f"codes of block {block}")
        assert_bytes_equal(ours.rowwise_scale, scale, f"scales of block {block}")
    ours = zerofp4.quantize(given.x, **RHT)
    codes, scale = peers.quantize_transformed(given.x, given.columnwise_amax)
    assert_bytes_equal(ours.columnwise_amax, given.columnwise_amax, "amax of the transform")
    assert_bytes_equal(ours.columnwise_data, codes, "codes of the transform")
    assert_bytes_equal(ours.columnwise_scale, scale, "scales of the transform")
    ours = zerofp4.quantize_mxfp8(given.x)
    elements, scale = peers.quantize_mxfp8(given.x)
    assert_bytes_equal(ours.rowwise_data, elements, "elements")
    assert_bytes_equal(ours.rowwise_scale.view(torch.uint8), scale, "E8M0 scales")


def test_the_reference_that_is_compiled_swizzles_as_we_do(given):
    ours = zerofp4.quantize(given.x, block=inputs.ACTIVATION, scale_layouts=("swizzled",))
    theirs = reference_swizzle(ours.rowwise_scale, *given.x.shape)
    assert_bytes_equal(ours.rowwise_scale_swizzled, theirs, "swizzled scales")


def test_the_matmul_is_the_transform_of_the_rows(given):
    expected = reference.hadamard_transform(given.x.t()).t()
    # The sum of 128 products, most of them 0, in another order than the butterfly's, rounded to bfloat16.
    torch.testing.assert_close(block_diagonal(given.x)().view_as(given.x), expected, rtol=2**-7, atol=1e-6)


def test_scales_in_the_swizzled_layout_alone(given):
    ours = zerofp4.quantize(given.x, **RHT, scale_layouts=("swizzled",))
    alone = zerofp4.quantize(torch.zeros_like(given.x), **RHT, scale_layouts=("swizzled",))
    alone = inputs.without_compact_scales(alone)
    zerofp4.ops.quantize_into(given.x, alone.record, **given.amaxes)
    for name in ("rowwise_data", "rowwise_scale_swizzled", "columnwise_data", "columnwise_scale_swizzled"):
        assert_bytes_equal(getattr(alone, name), getattr(ours, name), name)
    n = given.x.numel()
    assert rules.quantize(given.x, alone).bytes == 2 * n + n + 128 * (8 + 4) + 8


def test_packages_get_the_scale_that_ours_has(given, monkeypatch):
    calls = []
    gemlite = types.SimpleNamespace(scale_activations_nvfp4=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "gemlite", types.ModuleType("gemlite"))
    monkeypatch.setitem(sys.modules, "gemlite.quant_utils", gemlite)
    package = types.SimpleNamespace(
        QuantizationConfig=lambda **options: options, quantize=lambda *arguments: calls.append(arguments)
    )
    monkeypatch.setitem(sys.modules, "fouroversix", package)
    outside.gemlite_nvfp4(given.x, given.amax)()
    outside.fouroversix_nvfp4(given.x, 16)()
    (x, scale), (_, config) = calls
    assert x is given.x and scale.item() == pytest.approx(2688 / given.amax.item())
    assert config == {"backend": "triton", "scale_rule": "static_6", "block_scale_2d": True}


def test_parts_are_compiled_for_their_sizes_and_run_in_turn(monkeypatch):
    asked, ran = [], []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    run = peers.compiled(peers.Part(ran.append, (1,)), peers.Part(ran.append, (2,), peers.EXACT))
    assert asked == [{"dynamic": False, "options": None}, {"dynamic": False, "options": peers.EXACT}]
    run()
    assert ran == [1, 2]


def test_an_error_of_another_kind_is_no_reason_to_leave_a_peer_out():
    measured = Session("quantize", CPU, 1, with_profile=False)
    with pytest.raises(ZeroDivisionError):
        peers.attempt(measured, "peer/64", {}, lambda: lambda: 1 / 0, RuntimeError)
