"""The operators of layers of groups that compiled code calls, by zerofp4._autograd: they give the bytes of
their implementations in Python, which do what is not plain, and they run next to no Python.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from cases.frames import TORCH, frames
from cases.nodes import assert_each_same
from helpers import assert_bytes_equal, poisoned_allocations
from tensor_helpers import DTYPES, VIEWS, values

import zerofp4
from zerofp4 import ops
from zerofp4.nn import GroupedLinear, NVFP4Recipe, autocast, native
from zerofp4.nn.grouped_operators import _gradients, _grouped_linear
from zerofp4.storage import BUFFERS

pytestmark = [
    pytest.mark.skipif(ops.why_python_autograd() is not None, reason=str(ops.why_python_autograd())),
    pytest.mark.usefixtures("multiplied_at_once"),
]

KINDS = ["primary", "cached", "of the call"]
EXACT = NVFP4Recipe(backend="exact")
RECIPES = {
    "default": EXACT,
    "nearest": dataclasses.replace(EXACT, stochastic_rounding=False),
    "no transform": dataclasses.replace(EXACT, hadamard=False),
    "no signs": dataclasses.replace(EXACT, random_signs=False),
}
SPLITS = [[16, 0, 17, 3], [0, 0, 36, 0], [9, 9, 9, 9]]
FORWARD, BACKWARD = torch.ops.zerofp4.grouped_linear, torch.ops.zerofp4.grouped_linear_gradients


class Call:
    """The arguments of both operators by name, of a layer of groups [48, 64]."""

    def __init__(
        self, device, splits=(16, 0, 17, 3), *, recipe=EXACT, kind="of the call", stacked=False, **options
    ):
        with autocast(recipe):  # which makes its key known
            pass
        options = {"device": device, "dtype": torch.bfloat16, **options}
        count, primary = len(splits), kind == "primary"
        self.splits, self.grad = torch.tensor(splits, device=device), values(36, 48, device=device, seed=3)
        self.x = values(36, 64, device=device)
        torch.manual_seed(1)
        layer = GroupedLinear(count, 64, 48, stacked=stacked, primary_weights=primary, **options)
        self.parts = [layer] if stacked else list(layer.experts)
        weights = [part.weight for part in self.parts]
        self.layer, self.biases = layer, [part.bias.detach() for part in self.parts]
        buffers = [weight.record.buffer(name) for weight in weights for name in BUFFERS] if primary else []
        self.weights = {
            "weights": [] if primary else [weight.detach() for weight in weights],
            "primary": buffers,
            "e4m3_max": [448] * len(weights) if primary else [],
            "dtype": options["dtype"],
            "recipe": recipe.key,
            "caches": [part._weight_cache.handle for part in self.parts] if kind == "cached" else [],
        }
        self.is_first, self.x_needs, self.weight_needs = kind == "cached", True, True

    def forward(self, run) -> list[torch.Tensor]:
        needs = self.is_first, self.x_needs, self.weight_needs
        return run(self.x, self.splits, self.biases, *self.weights.values(), *needs)

    def backward(self, run, kept: list[torch.Tensor]) -> list[torch.Tensor]:
        """kept: what forward() gave behind y."""
        offsets, error, *rest = kept
        count = 3 * self.weight_needs
        x, own = rest[:count], rest[count:]
        weights = self.weights if not own else self.weights | {"weights": []}
        torch.manual_seed(7)
        places = self.splits, offsets, error
        needs = self.x_needs, bool(self.biases)
        return run(self.grad, *places, x, 64, own, *weights.values(), *needs)

    def assert_same(self) -> None:
        """Both operators and both implementations in Python give the same."""
        with poisoned_allocations():
            made, expected = self.forward(FORWARD), self.forward(_grouped_linear)
        assert_each_same(made, expected, "forward")
        with poisoned_allocations():
            found = self.backward(BACKWARD, made[1:])
            assert_each_same(found, self.backward(_gradients, expected[1:]), "backward")
        assert len(found) == self.x_needs + self.weight_needs + bool(self.biases)

    def run_both(self) -> None:
        self.backward(BACKWARD, self.forward(FORWARD)[1:])


@pytest.fixture
def by_python(monkeypatch, quantized) -> list:
    """The shapes of what Python has quantized, in groups or not."""
    original = zerofp4.nn.grouped_function.quantize_grouped

    def counting(x, *arguments, **options):
        quantized.append(tuple(x.shape))
        return original(x, *arguments, **options)

    monkeypatch.setattr(zerofp4.nn.grouped_function, "quantize_grouped", counting)
    return quantized


# Bytes


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stacked", [False, True])
def test_bytes(device, stacked, kind, splits, by_python):
    call = Call(device, splits, kind=kind, stacked=stacked)
    if kind == "cached":
        call.forward(FORWARD)  # quantizes the weights, in Python
        call.is_first = False
    by_python.clear()
    call.run_both()
    assert by_python == []
    call.assert_same()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_recipes(device, kind, name):
    Call(device, recipe=RECIPES[name], kind=kind).assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stacked", [False, True])
def test_dtypes_of_parameters(device, stacked, bias, dtype, by_python):
    call = Call(device, dtype=dtype, stacked=stacked)
    call.biases = call.biases if bias else []
    call.run_both()
    assert by_python == []
    call.assert_same()


@pytest.mark.parametrize(("x_needs", "weight_needs"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_no_gradient(device, kind, x_needs, weight_needs):
    call = Call(device, kind=kind)
    call.x_needs, call.weight_needs = x_needs, weight_needs
    call.assert_same()


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "of three dimensions"])
def test_memory_out_of_order(device, view, by_python):
    call = Call(device)
    call.splits, call.x, call.grad = call.splits.int(), VIEWS[view](call.x), VIEWS[view](call.grad)
    call.splits[-1] += len(call.x) - 36
    call.run_both()
    assert by_python == []
    call.assert_same()


def test_weights_of_four_over_six(device, by_python):
    call, records = Call(device, kind="primary"), []
    for e in range(4):
        chosen = zerofp4.FourOverSix(256)
        records.append(zerofp4.quantize(values(48, 64, device=device, seed=e), four_over_six=chosen).record)
    call.weights["primary"] = [record.buffer(name) for record in records for name in BUFFERS]
    call.weights["e4m3_max"] = [256] * 4
    by_python.clear()
    call.run_both()
    assert by_python == []
    call.assert_same()


@pytest.mark.parametrize("stacked", [False, True])
def test_kept_values(device, stacked):
    """They are read in both passes, and not the codes."""
    recipe = dataclasses.replace(EXACT, cache="dequantized")
    call = Call(device, recipe=recipe, kind="cached", stacked=stacked)
    expected = call.forward(FORWARD)
    call.is_first = False
    for part in call.parts:
        part._weight_cache._tensor.rowwise_data.zero_()
    assert_each_same(call.forward(FORWARD), expected, "forward")
    call.assert_same()


@pytest.mark.parametrize("stacked", [False, True])
def test_results_share_no_memory(device, stacked):
    """As the schema says. Compiled code frees and reuses the memory of one alone."""
    made = Call(device, stacked=stacked).forward(FORWARD)
    assert len({each.untyped_storage().data_ptr() for each in made}) == len(made) == (9 if stacked else 18)
    assert all(each.storage_offset() == 0 for each in made)


def test_gradients_of_the_operator(device):
    """By torch's kernel for its formula, in Python."""
    call, found = Call(device), []
    leaves = {"x": call.x.requires_grad_(), **dict(call.layer.named_parameters())}
    call.biases = [part.bias for part in call.parts]
    call.weights["weights"] = [part.weight for part in call.parts]
    with autocast(EXACT):
        for run in (lambda: call.forward(FORWARD)[0], lambda: call.layer(call.x, call.splits)):
            y = run()
            torch.manual_seed(7)
            y.backward(call.grad)
            found.append({"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
            for leaf in leaves.values():
                leaf.grad = None
    for name, gradient in found[0].items():
        assert_bytes_equal(gradient, found[1][name], name)


# What Python does


def test_weights_in_blocks_of_1x16(device, by_python):
    call = Call(device, recipe=dataclasses.replace(EXACT, weight_block=(1, 16)))
    by_python.clear()
    call.run_both()
    assert (36, 64) in by_python and (36, 48) in by_python
    call.assert_same()


def test_inference_mode(device, by_python):
    call = Call(device)
    by_python.clear()
    with torch.inference_mode():
        made = call.forward(FORWARD)
    assert by_python
    assert_each_same(made, call.forward(_grouped_linear), "forward")


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(8)
    return tensor


WRONG = {
    "x of another size": lambda call: setattr(call, "x", call.x[:, :-8]),
    "x that was freed": lambda call: setattr(call, "x", shrunk(call.x)),
    "splits of another sum": lambda call: call.splits.fill_(8),
    "splits of floats": lambda call: setattr(call, "splits", call.splits.double()),
    "a weight of another dtype": lambda call: call.weights.update(
        weights=[weight.double() for weight in call.weights["weights"]]
    ),
    "a weight that was freed": lambda call: call.weights.update(
        weights=[shrunk(weight) for weight in call.weights["weights"]]
    ),
    "no weights": lambda call: call.weights.update(weights=[]),
    "a recipe that nobody entered": lambda call: call.weights.update(recipe="other"),
    "a later micro-batch without a first": lambda call: call.weights.update(
        caches=[part._weight_cache.handle for part in call.parts]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_by_python(name):
    call = Call("cpu")
    WRONG[name](call)
    with pytest.raises((IndexError, KeyError, RuntimeError, TypeError, ValueError)) as expected:
        call.forward(_grouped_linear)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        call.forward(FORWARD)


# Compiled layers

OF_A_CALL = {"dequantize.py: neutral_amax": 1, "device.py: wait": 1}


@pytest.mark.heavy
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_this_package(fresh_compiler, kind, stacked):
    """On the CPU, where the backward pass runs in the thread that asks for it."""
    call = Call("cpu", kind=kind, stacked=stacked)
    outputs, first = [], (True, False, False) if kind == "cached" else (None,) * 3

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x, splits, is_first):
        return call.layer(x, splits, is_first)

    with autocast(EXACT):
        for is_first in first:
            x = call.x.clone().requires_grad_()
            forward = frames(lambda: outputs.append(run(x, call.splits, is_first)))  # noqa: B023
            backward = frames(lambda: outputs.pop().backward(call.grad))
    assert forward.pop("recipe.py: __getattr__") == 1  # a guard
    if TORCH < (2, 12):
        forward.pop("quantized_tensor.py: __torch_function__", None)
    if kind == "cached":
        assert forward == backward and forward.total() <= 50
    else:
        assert forward == backward == OF_A_CALL


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches(fresh_compiler, device, kind, monkeypatch):
    """Compiled, they give the bytes of the node in Python, and go on in the same random numbers."""

    def train(compiled: bool) -> list[torch.Tensor]:
        layer, found = Call(device, kind=kind).layer, []
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        for part, splits in enumerate(SPLITS):
            x = values(36, 64, device=device, seed=part).requires_grad_()
            with autocast(EXACT):
                y = run(x, torch.tensor(splits, device=device), part == 0 if kind == "cached" else None)
            torch.manual_seed(part)
            y.backward(values(36, 48, device=device, seed=9))
            found += [y.detach(), x.grad, torch.rand(1, device=device)]
        return found + [parameter.grad for parameter in layer.parameters()]

    made = train(compiled=True)
    monkeypatch.setattr(native, "_groups", None)
    assert_each_same(made, train(compiled=False), "training")
