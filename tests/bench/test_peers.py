"""What python -m benchmarks compares with: the reference does our work, and how packages are called."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch
from helpers import assert_bytes_equal

import zerofp4
from benchmarks import peers, rules
from benchmarks.session import Session
from benchmarks.tensors import ACTIVATION, RHT, WEIGHT, make_input
from benchmarks.workloads import Tensors, square

CPU = torch.device("cpu")


@pytest.fixture
def given():
    return make_input(Session("quantize", CPU, 1), (64, 96))


def test_the_reference_that_is_compiled_does_what_we_do(given):
    for block in (ACTIVATION, WEIGHT):
        ours = zerofp4.quantize(given.x, block=block)
        codes, scale = peers.quantize(given.x, given.amaxes["amax"], block[0])
        assert_bytes_equal(ours.rowwise_data, codes, f"codes of block {block}")
        assert_bytes_equal(ours.rowwise_scale, scale, f"scales of block {block}")
    ours = zerofp4.quantize(given.x, **RHT)
    codes, scale = peers.quantize_transformed(given.x, given.amaxes["columnwise_amax"])
    assert_bytes_equal(ours.columnwise_amax, given.amaxes["columnwise_amax"], "amax of the transform")
    assert_bytes_equal(ours.columnwise_data, codes, "codes of the transform")
    assert_bytes_equal(ours.columnwise_scale, scale, "scales of the transform")
    ours = zerofp4.quantize_mxfp8(given.x)
    elements, scale = peers.quantize_mxfp8(given.x)
    assert_bytes_equal(ours.rowwise_data, elements, "elements")
    assert_bytes_equal(ours.rowwise_scale.view(torch.uint8), scale, "E8M0 scales")
    tensors = Tensors(square(64), CPU)
    tensors.plan().step()
    codes, scale, amax = peers.cast(tensors.flat.view(64, 64))
    assert_bytes_equal(tensors.weights[0].rowwise_data, codes, "codes of a cast")
    assert_bytes_equal(tensors.weights[0].rowwise_scale, scale, "scales of a cast")
    assert_bytes_equal(tensors.weights[0].amax, amax, "amax of a cast")
    ours = zerofp4.quantize(given.x, block=ACTIVATION, scale_layouts=("swizzled",))
    theirs = peers.swizzle(ours.rowwise_scale, *given.x.shape)
    assert_bytes_equal(ours.rowwise_scale_swizzled, theirs, "swizzled scales")


# Packages


@pytest.mark.parametrize(("major", "asked"), [(9, [False]), (10, [])])
def test_packages_get_the_scale_that_ours_has(major, asked, given, monkeypatch):
    calls, packing = [], []
    gemlite = types.SimpleNamespace(set_ptx_fp4_pack=packing.append)
    gemlite.quant_utils = types.SimpleNamespace(scale_activations_nvfp4=lambda *given: calls.append(given))
    package = types.SimpleNamespace(
        QuantizationConfig=lambda **options: options,
        quantize_to_fp4=lambda *arguments: calls.append(arguments),
    )
    monkeypatch.setitem(sys.modules, "gemlite", gemlite)
    monkeypatch.setitem(sys.modules, "gemlite.quant_utils", gemlite.quant_utils)
    monkeypatch.setitem(sys.modules, "fouroversix", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    peers.gemlite_nvfp4(given.x, given.amaxes["amax"])()
    peers.fouroversix_nvfp4(given.x, given.amaxes["amax"], 16, "mae")()
    (x, scale), (_, config) = calls
    assert x is given.x and scale.item() == pytest.approx(2688 / given.amaxes["amax"].item())
    assert packing == asked, (
        "its instruction for E2M1 is refused where there is none, and left alone elsewhere"
    )
    assert config == {
        "backend": "triton",
        "scale_rule": "mae",
        "block_scale_2d": True,
        "kwargs": {"x_amax": given.amaxes["amax"]},
    }


def raising(error: Exception):
    def call(*_, **__):
        raise error

    return call


def test_a_peer_that_fails_is_named_and_the_rest_is_measured(capsys):
    """Where it is imported, called or compiled, or where a kernel of it ends."""
    measured = Session("quantize", CPU, 1)
    ours = measured.time("quantize_1d/64", lambda: None, rules.Moved(1000, "n", 500))
    errors = {
        "torchao": raising(ImportError("no torchao")),
        "gemlite": raising(AssertionError("Torch not compiled with CUDA enabled")),
        "fouroversix": lambda: raising(RuntimeError("no kernel\nfor this GPU")),
    }
    peers.packages(measured, ours, **errors, good=lambda: lambda: None)
    _, theirs = measured.rows
    assert theirs["name"] == "good_quantize_1d/64" and theirs["package"] == "good of unknown version"
    assert (theirs["bytes"], theirs["elements"], theirs["times_ours"] > 0) == (1000, 500, True)
    measured.clock.synchronize = raising(RuntimeError("the kernel failed"))
    peers.packages(measured, ours, late=lambda: lambda: None)
    assert len(measured.rows) == 2
    said = capsys.readouterr().out
    failed = {"torchao": "no torchao", "gemlite": "Torch not compiled with CUDA enabled"}
    for package, error in (failed | {"fouroversix": "no kernel", "late": "the kernel failed"}).items():
        assert f"{package}_quantize_1d/64 is left out: {error}\n" in said


def share_of_equal_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = (tensor.contiguous().view(torch.uint8).flatten() for tensor in (ours, theirs))
    assert ours.shape == theirs.shape
    return (ours == theirs).float().mean().item()


def not_compiled(function=None, **_):
    """In place of torch.compile, also as a decorator with arguments."""
    return (lambda decorated: decorated) if function is None else function


def needs(package: str, device: torch.device) -> None:
    """Skip where the package is not installed; all but torchao need a GPU."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package != "torchao" and device.type != "cuda":
        pytest.skip(f"{package} needs a GPU")


@pytest.mark.parametrize(
    ("package", "operation"),
    [
        ("torchao", "quantize_1d"),
        ("gemlite", "quantize_1d"),
        ("fouroversix", "quantize_1d"),
        ("fouroversix", "quantize_2d"),
        ("fouroversix", "quantize_1d_four_over_six"),
        ("fouroversix", "quantize_2d_four_over_six"),
    ],
)
def test_packages_make_nearly_our_codes(package, operation, device, monkeypatch):
    """Ties and scales that lie between two values of E4M3 are all that they may round otherwise: with another
    convention for the scale of the tensor hardly a byte would be ours.
    """
    needs(package, device)
    monkeypatch.setattr(torch, "compile", not_compiled)
    torch.manual_seed(0)
    x = torch.randn(256, 512, dtype=torch.bfloat16, device=device)
    amax = x.abs().amax().float().reshape(1)
    rows = 16 if "2d" in operation else 1
    choice = zerofp4.FourOverSix() if operation.endswith("four_over_six") else None
    ours = zerofp4.quantize(x, block=(rows, 16), amax=amax, four_over_six=choice)
    if package == "torchao":
        ((scale, codes),) = peers.torchao_nvfp4(x, amax)()
    elif package == "gemlite":
        codes, scale, _ = peers.gemlite_nvfp4(x, amax)()
    else:
        rule = choice.error if choice else "static_6"
        made = peers.fouroversix_nvfp4(x, amax, rows, rule)()
        codes, scale = made.values, made.scale_factors
        assert share_of_equal_bytes(ours.swizzled_scale(), scale) > 0.9
    if package != "fouroversix":
        assert share_of_equal_bytes(ours.rowwise_scale, scale) > 0.9
    assert share_of_equal_bytes(ours.rowwise_data, codes) > 0.9


def test_torchao_swizzles_and_makes_mxfp8_as_we_do(device, monkeypatch):
    needs("torchao", device)
    monkeypatch.setattr(torch, "compile", not_compiled)
    torch.manual_seed(0)
    x = torch.randn(256, 512, dtype=torch.bfloat16, device=device)
    nvfp4 = zerofp4.quantize(x, block=ACTIVATION)
    (swizzled,) = peers.torchao_swizzle(nvfp4.rowwise_scale)()
    assert share_of_equal_bytes(nvfp4.swizzled_scale(), swizzled) == 1
    ours = zerofp4.quantize_mxfp8(x)
    ((scale, elements),) = peers.torchao_quantize_mxfp8(x)()
    assert share_of_equal_bytes(ours.rowwise_scale, scale) > 0.99
    assert share_of_equal_bytes(ours.rowwise_data, elements) > 0.99
    make = peers.torchao_dequantize_mxfp8(ours.rowwise_data, ours.rowwise_scale, torch.bfloat16)
    assert share_of_equal_bytes(ours.dequantize(torch.bfloat16), make()[0]) == 1


# Peers


def test_parts_are_compiled_for_their_sizes_and_run_in_turn(monkeypatch):
    asked, ran = [], []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    run = peers.compiled(peers.Part(ran.append, (1,)), peers.Part(ran.append, (2,), peers.EXACT))
    assert asked == [{"dynamic": False, "options": None}, {"dynamic": False, "options": peers.EXACT}]
    run()
    assert ran == [1, 2]
