"""The operators of a layer that compiled code calls, by zerofp4._autograd: they give the bytes of their
implementations in Python, which do what is not plain, and they run next to no Python.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from cases.frames import TORCH, frames
from cases.layers import RECIPES
from cases.nodes import assert_each_same
from helpers import assert_bytes_equal, poisoned_allocations
from tensor_helpers import DTYPES, VIEWS, values
from torch import nn

import zerofp4
from zerofp4 import ops
from zerofp4.nn import Linear, NVFP4Recipe, autocast, native
from zerofp4.nn.operators import NO_CACHE, _linear, _linear_gradients
from zerofp4.storage import BUFFERS

pytestmark = pytest.mark.skipif(ops.why_python_autograd() is not None, reason=str(ops.why_python_autograd()))

PYTHON = ["nvfp4, weights 1x16", "nvfp4, dequantized", "mxfp8", "mxfp8, dequantized"]
EXACT = {name: dataclasses.replace(recipe, backend="exact") for name, recipe in RECIPES.items()}
KINDS = ["primary", "cached", "of the call"]


class Call:
    """The arguments of both operators by name, of a layer [48, 80]."""

    def __init__(self, device, recipe=EXACT["nvfp4"], *, kind="of the call", tokens=6, dtype=torch.bfloat16):
        with autocast(recipe):  # which makes its key known
            pass
        options = {"device": device, "dtype": dtype}
        self.tokens, self.grad = tokens, values(tokens, 48, seed=3, **options)
        torch.manual_seed(1)
        self.layer = Linear(80, 48, primary_weights=kind == "primary", **options)
        weight = self.layer.weight
        self.weight = {
            "weight": weight.detach(),
            "primary": [],
            "dtype": dtype,
            "e4m3_max": 448,
            "recipe": recipe.key,
            "cache": self.layer._weight_cache.handle if kind == "cached" else NO_CACHE,
        }
        if kind == "primary":
            self.weight |= {"weight": None, "primary": [weight.record.buffer(name) for name in BUFFERS]}
        self.bias, self.x = self.layer.bias.detach(), values(tokens, 80, **options)
        self.is_first, self.x_needs, self.weight_needs = kind == "cached", True, True

    def forward(self, run) -> list[torch.Tensor]:
        needs = self.x_needs, self.weight_needs
        return run(self.x, self.bias, *self.weight.values(), self.is_first, *needs)

    def backward(self, run, kept: list[torch.Tensor]) -> list[torch.Tensor]:
        """kept: what forward() gave behind y."""
        is_own = self.weight["weight"] is not None and self.weight["cache"] == NO_CACHE
        count = len(kept) // (1 + (is_own and self.x_needs)) if self.weight_needs else 0
        own = kept[count:]
        weight = self.weight if not own else self.weight | {"weight": None}
        torch.manual_seed(7)
        return run(self.grad, kept[:count], 80, own, *weight.values(), self.x.dtype, self.x_needs)

    def assert_same(self) -> None:
        """Both operators and both implementations in Python give the same."""
        with poisoned_allocations():
            made, expected = self.forward(torch.ops.zerofp4.linear), self.forward(_linear)
        assert_each_same(made, expected, "forward")
        with poisoned_allocations():
            found = self.backward(torch.ops.zerofp4.linear_gradients, made[1:])
            assert_each_same(found, self.backward(_linear_gradients, expected[1:]), "backward")
        assert len(found) == self.x_needs + self.weight_needs


def run_both(call: Call) -> None:
    kept = call.forward(torch.ops.zerofp4.linear)[1:]
    call.backward(torch.ops.zerofp4.linear_gradients, kept)


# Bytes


@pytest.mark.parametrize("name", [name for name in EXACT if name not in PYTHON])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes(device, kind, name, quantized):
    for tokens in (6, 32, *((1, 17) if EXACT[name].hadamard else ())):
        call = Call(device, EXACT[name], kind=kind, tokens=tokens)
        if kind == "cached":
            call.forward(torch.ops.zerofp4.linear)  # quantizes the weight, in Python
            call.is_first = False
        quantized.clear()
        run_both(call)
        assert quantized == []
        call.assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_dtypes(device, bias, dtype, quantized):
    call = Call(device, dtype=dtype)
    call.bias = call.bias if bias else None
    run_both(call)
    assert quantized == []
    call.assert_same()


@pytest.mark.parametrize(("x_needs", "weight_needs"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_no_gradient(device, kind, x_needs, weight_needs):
    call = Call(device, kind=kind)
    call.x_needs, call.weight_needs = x_needs, weight_needs
    call.assert_same()


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "of three dimensions"])
def test_memory_out_of_order(device, view, quantized):
    call = Call(device, tokens=34)
    call.x, call.grad = VIEWS[view](call.x), VIEWS[view](call.grad)
    run_both(call)
    assert quantized == []
    call.assert_same()


@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
@pytest.mark.parametrize("columnwise", [True, False])
def test_primary_weights(device, columnwise, block, quantized):
    """Their rows are read, but of blocks of 1x16 the columns, where there are some: by Python."""
    recipe = dataclasses.replace(EXACT["nvfp4"], weight_block=block)
    call = Call(device, recipe, kind="primary")
    options = {"block": block, "columnwise": columnwise, "four_over_six": zerofp4.FourOverSix(256)}
    record = zerofp4.quantize(values(48, 80, device=device), **options).record
    call.weight |= {"primary": [record.buffer(name) for name in BUFFERS], "e4m3_max": 256}
    quantized.clear()
    run_both(call)
    assert (quantized != []) == (columnwise and block == (1, 16))
    call.assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_values(device, dtype):
    """They are read in both passes, and not the codes."""
    call = Call(device, NVFP4Recipe(backend="exact", cache="dequantized"), kind="cached", dtype=dtype)
    expected = call.forward(torch.ops.zerofp4.linear)
    call.is_first = False
    call.layer._weight_cache._tensor.rowwise_data.zero_()
    assert_each_same(call.forward(torch.ops.zerofp4.linear), expected, "forward")
    call.assert_same()


def test_results_share_no_memory(device):
    """As the schema says. Compiled code frees and reuses the memory of one alone."""
    made = Call(device).forward(torch.ops.zerofp4.linear)
    assert len({each.untyped_storage().data_ptr() for each in made}) == len(made) == 7
    assert all(each.storage_offset() == 0 for each in made)


# Autograd


def test_gradients_of_the_operator(device):
    """By torch's kernel for its formula, in Python."""
    call, found = Call(device), []
    leaves = {"x": call.x, "bias": call.layer.bias, "weight": call.layer.weight}
    call.x.requires_grad_()
    call.bias, call.weight["weight"] = call.layer.bias, call.layer.weight
    with autocast(EXACT["nvfp4"]):
        for run in (lambda: call.forward(torch.ops.zerofp4.linear)[0], lambda: call.layer(call.x)):
            y = run()
            torch.manual_seed(7)
            y.backward(call.grad)
            found.append({"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
            for leaf in leaves.values():
                leaf.grad = None
    for name, gradient in found[0].items():
        assert_bytes_equal(gradient, found[1][name], name)


def test_no_formula_where_no_gradient_is_needed(device):
    """As in compiled code: torch's kernel for it would take as long as the layer on the host."""
    call, folder = Call(device), str(Path(torch.__file__).parent / "_library")
    assert frames(lambda: call.forward(torch.ops.zerofp4.linear), folder) == {}
    call.x.requires_grad_()
    with torch.no_grad():
        assert frames(lambda: call.forward(torch.ops.zerofp4.linear), folder) == {}
    assert frames(lambda: call.forward(torch.ops.zerofp4.linear), folder) != {}


# What Python does


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize("kind", ["cached", "of the call"])
def test_other_recipes(device, kind, name):
    Call(device, EXACT[name], kind=kind).assert_same()


def test_rows_that_nothing_completes(device, quantized):
    """Of an odd number of them without the transform, Python completes the columns."""
    call = Call(device, EXACT["nvfp4, no transform"], tokens=17)
    run_both(call)
    assert (18, 80) in quantized
    call.assert_same()


def test_inference_mode(device, quantized):
    call = Call(device)
    with torch.inference_mode():
        made = call.forward(torch.ops.zerofp4.linear)
    assert quantized
    assert_each_same(made, call.forward(_linear), "forward")


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(8)
    return tensor


WRONG = {
    "x of another size": lambda call: setattr(call, "x", call.x[:, :-2]),
    "x of another dtype": lambda call: setattr(call, "x", call.x.double()),
    "x that was freed": lambda call: setattr(call, "x", shrunk(call.x)),
    "a bias of another size": lambda call: setattr(call, "bias", call.bias[1:]),
    "a weight of another dtype": lambda call: call.weight.update(weight=call.weight["weight"].double()),
    "a weight that was freed": lambda call: call.weight.update(weight=shrunk(call.weight["weight"])),
    "no weight": lambda call: call.weight.update(weight=None),
    "a recipe that nobody entered": lambda call: call.weight.update(recipe="other"),
    "a later micro-batch without a first": lambda call: call.weight.update(
        cache=call.layer._weight_cache.handle
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_by_python(name):
    call = Call("cpu")
    WRONG[name](call)
    with pytest.raises((KeyError, RuntimeError, TypeError, ValueError)) as expected:
        call.forward(_linear)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        call.forward(torch.ops.zerofp4.linear)


# Compiled layers

OF_A_CALL = {"dequantize.py: neutral_amax", "device.py: wait"}
OF_A_CACHE = {
    *OF_A_CALL,
    "native.py: _cached_rows",
    *(f"quantizers.py: {name}" for name in ("of_handle", "get", "_is_made_from", "weight_state")),
    *(f"quantizers.py: {name}" for name in ("native_rows", "reads_rows", "rows_are_enough")),
    *(f"sides.py: {name}" for name in ("data", "scales")),
    "nvfp4.py: e4m3_max",
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_frames_of_this_package(fresh_compiler, backend, kind):
    """On the CPU, where the backward pass runs in the thread that asks for it."""
    layer = Linear(64, 48, dtype=torch.bfloat16, primary_weights=kind == "primary")
    x, outputs = values(32, 64), []

    @torch.compile(fullgraph=True, backend=backend)
    def run(x, first):
        return layer(x, first)

    with autocast(EXACT["nvfp4"]):
        for first in (True, False, False) if kind == "cached" else (None,) * 3:
            forward = frames(lambda first=first: outputs.append(run(x.requires_grad_(), first)))
            backward = frames(lambda: outputs.pop().sum().backward())
    assert forward.pop("recipe.py: __getattr__") == 1  # a guard
    if TORCH < (2, 12):
        forward.pop("quantized_tensor.py: __torch_function__", None)
    allowed = OF_A_CACHE if kind == "cached" else OF_A_CALL
    assert set(forward) == set(backward) == allowed
    assert set(forward.values()) == set(backward.values()) == {1}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches(fresh_compiler, device, kind, monkeypatch):
    """Compiled, they give the bytes of the node in Python, and go on in the same random numbers."""

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        options = {"dtype": torch.bfloat16, "device": device, "primary_weights": kind == "primary"}
        model = nn.Sequential(Linear(64, 48, **options), Linear(48, 64, **options))

        def forward(x, first):
            for layer in model:
                x = layer(x, first)
            return x

        run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
        found = []
        for step in range(2):
            for part in range(3):
                x = values(32, 64, device=device, seed=part).requires_grad_()
                with autocast(EXACT["nvfp4"]):
                    y = run(x, part == 0 if kind == "cached" else None)
                torch.manual_seed(part)
                y.backward(values(32, 64, device=device, seed=9))
                found += [y.detach(), x.grad, torch.rand(1, device=device)]
            found += [parameter.grad.clone() for parameter in model.parameters()]
            if kind != "primary":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad, alpha=1e-3 * (step + 1))
        return found

    made = train(compiled=True)
    monkeypatch.setattr(native, "_layer", None)
    assert_each_same(made, train(compiled=False), "training")
