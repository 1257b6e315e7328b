"""GroupedLinear where C++ multiplies: it gives the bytes of the products in Python, to which it leaves what
is not plain.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from cases import nodes
from cases.frames import frames
from cases.nodes import gradients_of
from cases.nodes import layers_by_both as by_both
from cases.nodes import layers_same as assert_same
from helpers import assert_bytes_equal
from tensor_helpers import VIEWS, values
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.nn import GroupedLinear, NVFP4Recipe, autocast, grouped_linear, operators
from zerofp4.tensors import grouped

KINDS = ["primary", "cached", "of the call"]
RECIPE = NVFP4Recipe(backend="exact")


class Case:
    """A layer of 4 experts [48, 64] and its inputs, made anew for each run. Random numbers of the backward
    pass are those after manual_seed(7).
    """

    def __init__(
        self, device, splits=(16, 0, 17, 3), *, kind="of the call", recipe=RECIPE, frozen=(), **options
    ):
        self.options = {"dtype": torch.bfloat16, "device": device, **options}
        self.splits, self.kind, self.recipe, self.device = list(splits), kind, recipe, device
        self.frozen, self.count = frozen, len(splits)
        self.first = True if kind == "cached" else None
        self.grad = values(sum(splits), 48, device=device, seed=3)

    def layer(self) -> GroupedLinear:
        torch.manual_seed(1)
        made = GroupedLinear(self.count, 64, 48, primary_weights=self.kind == "primary", **self.options)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return made

    def x(self) -> torch.Tensor:
        made = values(len(self.grad), 64, device=self.device)
        return made.requires_grad_("x" not in self.frozen)

    def call(self, layer, x) -> torch.Tensor:
        with autocast(self.recipe):
            return layer(x, self.splits, self.first)

    def run(self) -> dict[str, torch.Tensor | None]:
        layer, x = self.layer(), self.x()
        y = self.call(layer, x)
        if y.requires_grad:
            torch.manual_seed(7)
            y.backward(self.grad)
        return {"y": y, **gradients_of(layer, x)}


# A stack, one expert after another


@pytest.fixture
def one_by_one(monkeypatch):
    monkeypatch.setattr(grouped_linear, "why_one_by_one", lambda *_: "for a test")


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_one_by_one(device, kind, bias, quantized):
    """But for what has no tokens Python quantizes the weights, in one call, and nothing else."""
    case = Case(device, kind=kind, bias=bias)
    layer, x = case.layer(), case.x()
    quantized.clear()
    case.call(layer, x).backward(case.grad)
    of_weights = [] if kind == "primary" else [(4, 48, 64)]
    assert [shape for shape in quantized if shape[0]] == of_weights
    assert_same(case.run)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("kind", ["primary", "cached"])
def test_a_stack_one_by_one_that_is_written_to_in_between(device, kind):
    case = Case(device, kind=kind)

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, x)
        with torch.no_grad():
            layer.weight.copy_(values(4, 48, 64, device=device, seed=9))
        if kind == "cached":
            case.call(layer, x)
        with pytest.raises(RuntimeError, match="written to between its forward and its backward"):
            y.backward(case.grad)
        return {}

    assert_same(run)


@pytest.mark.usefixtures("one_by_one")
def test_a_stack_one_by_one_adds_to_main_grad(device):
    case = Case(device, fuse_wgrad_accumulation=True)

    def run():
        layer, x = case.layer(), case.x()
        layer.weight.main_grad = torch.ones(4, 48, 64, device=device)
        torch.manual_seed(7)
        case.call(layer, x).backward(case.grad)
        return {**gradients_of(layer, x), "main_grad": layer.weight.main_grad}

    assert_same(run)


# All groups at once

at_once = pytest.mark.usefixtures("multiplied_at_once")
SPLITS = [(16, 0, 17, 3), (0, 0, 36, 0), (9, 9, 9, 9)]
RECIPES = {
    "default": RECIPE,
    "nearest": dataclasses.replace(RECIPE, stochastic_rounding=False),
    "no transform": dataclasses.replace(RECIPE, hadamard=False),
    "no signs": dataclasses.replace(RECIPE, random_signs=False),
}


class Mode(TorchDispatchMode):
    """With which Python goes back."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@at_once
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes(device, kind, bias, splits):
    case = Case(device, splits, kind=kind, bias=bias)
    assert_same(case.run)


@at_once
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_recipes(device, kind, name):
    case = Case(device, kind=kind, recipe=RECIPES[name])
    assert_same(case.run)


@at_once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_of_parameters(device, dtype):
    """x is what torch's autocast makes of it."""
    case = Case(device, dtype=dtype)

    def run():
        with torch.autocast(device.type, torch.bfloat16):
            return case.run()

    with torch.autocast(device.type, torch.bfloat16):
        assert_same(run)


@at_once
@pytest.mark.parametrize("where", ["host", "host tensor", "int32", "not in order"])
def test_splits(device, where):
    case = Case(device)
    expected = case.run()
    tensor = torch.tensor(case.splits)
    case.splits = {
        "host": case.splits,
        "host tensor": tensor,
        "int32": tensor.int().to(device),
        "not in order": tensor.repeat_interleave(2).to(device)[::2],
    }[where]
    assert_same(case.run)
    for name, made in case.run().items():
        assert_bytes_equal(made.detach(), expected[name].detach(), name)


@at_once
@pytest.mark.parametrize(
    "frozen", ["", "x", "weight", "bias", "x weight", "weight bias", "x bias", "x weight bias"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen(device, kind, frozen):
    case = Case(device, kind=kind, frozen=frozen.split())
    assert_same(case.run)


@at_once
@pytest.mark.parametrize("experts", [1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_few_and_many_experts(device, kind, experts):
    """More than a kernel takes in its arguments."""
    case = Case(device, [3] * experts, kind=kind)
    assert_same(case.run)


@at_once
@pytest.mark.parametrize("view", [view for view in VIEWS if view != "of three dimensions"])
def test_memory_out_of_order(device, view):
    case = Case(device, (16, 0, 15, 3))

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, VIEWS[view](x))
        y.sum().backward()  # a gradient of one element
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)


@at_once
def test_weights_of_four_over_six(device):
    """Their e4m3_max is in the products of both passes, also where Python goes back."""
    case = Case(device)
    given = values(4, 48, 64, device=device)
    weight = zerofp4.quantize(given, four_over_six=zerofp4.FourOverSix(256))

    def run(**options):
        layer, x = case.layer(), case.x()
        layer.weight = torch.nn.Parameter(weight)
        y = case.call(layer, x)
        torch.manual_seed(7)
        found = torch.autograd.grad(y, [x, *layer.parameters()], case.grad, **options)
        return {"y": y, **{str(i): each for i, each in enumerate(found)}}

    assert_same(run)
    for name, tensor in run(create_graph=True).items():
        assert_bytes_equal(tensor.detach(), run()[name].detach(), name)


@at_once
@pytest.mark.parametrize("kind", KINDS)
def test_python_goes_back(device, kind):
    """Where a graph of the gradients is asked for, which has nothing behind it."""
    case = Case(device, kind=kind)

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, x)
        torch.manual_seed(7)
        grad = case.grad.clone().requires_grad_()
        found = torch.autograd.grad(y, [x, *layer.parameters()], grad, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            found[0].sum().backward()
        return {str(i): each for i, each in enumerate(found)}

    assert_same(run)
    for made, expected in zip(run().values(), list(case.run().values())[1:], strict=True):
        assert_bytes_equal(made.detach(), expected, "gradients")


@at_once
@pytest.mark.parametrize("goes_back", ["native", "python"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_main_grad(device, dtype, goes_back):
    case = Case(device, dtype=dtype, fuse_wgrad_accumulation=True)

    def run():
        layer, x = case.layer(), case.x()
        layer.weight.main_grad = torch.ones(layer.weight.shape, device=device)
        layer.weight.grad_added_to_main_grad = False
        with torch.autocast(device.type, torch.bfloat16):
            y = case.call(layer, x)
        torch.manual_seed(7)
        with Mode() if goes_back == "python" else contextlib.nullcontext():
            y.backward(case.grad)
        assert layer.weight.grad_added_to_main_grad
        return {"y": y, **gradients_of(layer, x), "main_grad": layer.weight.main_grad}

    assert_same(run)


@at_once
@pytest.mark.parametrize("buffer", [None, torch.ones(4, 48, 63)], ids=["none", "another size"])
def test_a_wrong_main_grad_is_the_same_error(device, buffer):
    case = Case(device, fuse_wgrad_accumulation=True)

    def run():
        layer, x = case.layer(), case.x()
        if buffer is not None:
            layer.weight.main_grad = buffer.to(device)
        with pytest.raises(RuntimeError) as error:
            case.call(layer, x).backward(case.grad)
        return str(error.value)

    made, expected = by_both(run)
    assert made == expected


@at_once
@pytest.mark.parametrize("kind", ["primary", "cached"])
def test_a_weight_that_is_written_to_in_between(device, kind):
    case = Case(device, kind=kind)

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, x)
        with torch.no_grad():
            layer.weight.copy_(values(4, 48, 64, device=device, seed=9))
        if kind == "cached":
            case.call(layer, x)
        with pytest.raises(RuntimeError, match=r"written to between|modified by an inplace"):
            y.backward(case.grad)
        return {}

    by_both(run)


@at_once
def test_splits_that_are_written_to_in_between(device, monkeypatch):
    """As a loop does that has one buffer for them: other rows would be those of an expert. On the CPU with
    what a GPU does, which reads the caller's.
    """
    case = Case(device)
    splits = torch.tensor(case.splits, device=device)
    monkeypatch.setattr(grouped, "_host_sizes", lambda *_: None)
    monkeypatch.setattr(grouped_linear, "sizes_on", lambda *_: splits)

    def run():
        splits.copy_(torch.tensor([16, 0, 17, 3]))
        layer, x = case.layer(), case.x()
        case.splits = splits
        y = case.call(layer, x)
        splits.copy_(torch.tensor([3, 17, 0, 16]))
        with pytest.raises(RuntimeError, match=r"m_splits was written to|modified by an inplace"):
            y.backward(case.grad)
        return {}

    by_both(run)


@at_once
@pytest.mark.parametrize("kind", KINDS)
def test_backward_twice(device, kind):
    case = Case(device, kind=kind)

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, x)
        torch.manual_seed(7)
        y.backward(case.grad, retain_graph=True)
        y.backward(case.grad)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward(case.grad)
        return gradients_of(layer, x)

    assert_same(run)


@at_once
def test_without_gradients(device):
    case = Case(device)
    with torch.no_grad():
        assert_same(lambda: {"y": case.call(case.layer(), case.x())})


@at_once
def test_checkpoint(device):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        with autocast(case.recipe):
            y = checkpoint(lambda x: layer(x, case.splits).square(), x, use_reentrant=False)
            torch.manual_seed(7)
            y.backward(case.grad)
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)


@at_once
def test_a_checkpoint_computes_no_product_that_nothing_needs(device):
    """What is saved is so in front of the products, which are not computed again."""
    case = Case(device)
    layer, x = case.layer(), case.x()

    def products(run) -> int:
        with autocast(case.recipe):
            return nodes.count_calls(
                lambda: run(x, case.splits).backward(case.grad), "aten::mm", "aten::_grouped_mm"
            )

    found = products(partial(checkpoint, layer, use_reentrant=False))
    assert found == products(layer) > 0


@at_once
def test_what_is_saved(device):
    """Of x its columnwise copy, of a weight that is quantized for the call its rows."""
    case, saved = Case(device, frozen=("bias",)), []
    layer, x = case.layer(), case.x()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor.clone()
    ):
        y = case.call(layer, x)
    torch.manual_seed(7)
    y.backward(case.grad)
    rows = 96  # 36 and 15 for each group, up to a multiple of 16
    assert saved[:3] == [(64 * rows // 2,), (64 * rows // 16,), (4,)]
    assert saved[3:] == [(4, 48, 32), (4, 3, 4), (4,)]
    assert_bytes_equal(x.grad, case.run()["x"], "gradient of x")


@at_once
def test_python_quantizes_nothing(device, quantized, monkeypatch):
    case, called = Case(device), []
    quantize = operators.quantize_grouped
    monkeypatch.setattr(operators, "quantize_grouped", lambda *a, **k: called.append(1) or quantize(*a, **k))
    layer, x = case.layer(), case.x()
    made, expected = by_both(
        lambda: (case.call(layer, x).backward(case.grad), len(quantized), len(called))[1:]
    )
    assert (made, expected) == ((0, 0), (1, 2))


@at_once
@pytest.mark.parametrize("kind", KINDS)
def test_frames_of_this_package(kind):
    """On the CPU, where the backward pass runs in the thread that asks for it. They do not depend on the
    number of experts.
    """
    found = []
    for experts in (4, 8):
        case = Case("cpu", [4] * experts, kind=kind)
        layer, outputs, case.splits = case.layer(), [], torch.tensor(case.splits)
        for first in (True, False, False) if kind == "cached" else (None,) * 3:
            case.first, x = first, case.x()
            forward = frames(lambda: outputs.append(case.call(layer, x)))  # noqa: B023
            backward = frames(lambda: outputs.pop().backward(case.grad))  # noqa: B023
        found.append((forward.total(), backward.total()))
    (forward, backward), (more_forward, more_backward) = found
    assert forward <= 76 and backward <= 14
    assert (forward, backward) == (more_forward, more_backward)


# What Python does


@at_once
@pytest.mark.parametrize("splits", [[16, 0, 17, 4], [40, -4, 0, 0]], ids=str)
def test_wrong_splits_on_a_cpu_are_the_same_error(splits):
    case = Case("cpu")
    layer, x = case.layer(), case.x()

    def run():
        with pytest.raises(ValueError) as error, autocast(RECIPE):
            layer(x, torch.tensor(splits))
        return str(error.value)

    made, expected = by_both(run)
    assert made == expected and "m_splits" in made


@at_once
def test_weights_in_blocks_of_1x16(device):
    recipe = dataclasses.replace(RECIPE, weight_block=(1, 16))
    case = Case(device, recipe=recipe)
    assert_same(case.run)


@at_once
def test_inference_mode(device):
    case = Case(device)

    def run():
        with torch.inference_mode():
            return {"y": case.call(case.layer(), case.x()).clone()}

    assert_same(run)
