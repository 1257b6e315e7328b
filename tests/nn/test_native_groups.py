"""GroupedLinear by zerofp4._autograd: it gives the bytes of the nodes in Python, and leaves to those what is
not plain.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import nodes
from tensor_helpers import values

from zerofp4 import ops
from zerofp4.nn import GroupedLinear, NVFP4Recipe, autocast, grouped_linear, native
from zerofp4.tensors import Quantizer

pytestmark = pytest.mark.skipif(ops.why_python_autograd() is not None, reason=str(ops.why_python_autograd()))

KINDS = ["primary", "cached", "of the call"]
RECIPE = NVFP4Recipe(backend="exact")


class Case:
    """A layer of 4 experts [48, 64] and its inputs, made anew for each run. Random numbers of the backward
    pass are those after manual_seed(7).
    """

    def __init__(self, device, splits=(16, 0, 17, 3), *, kind="of the call", recipe=RECIPE, **options):
        self.options = {"dtype": torch.bfloat16, "device": device, **options}
        self.splits, self.kind, self.recipe, self.device = list(splits), kind, recipe, device
        self.frozen: tuple[str, ...] = ()
        self.first = True if kind == "cached" else None
        self.grad = values(sum(splits), 48, device=device, seed=3)

    def layer(self) -> GroupedLinear:
        torch.manual_seed(1)
        made = GroupedLinear(4, 64, 48, primary_weights=self.kind == "primary", **self.options)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.split(".")[-1] not in self.frozen)
        return made

    def x(self) -> torch.Tensor:
        made = values(sum(self.splits), 64, device=self.device)
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


def gradients_of(layer, x) -> dict[str, torch.Tensor | None]:
    return {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


@pytest.fixture
def quantized(monkeypatch) -> list:
    """The shapes of what Python has quantized."""
    found, original = [], Quantizer.record

    def counting(self, x, **options):
        found.append(tuple(x.shape))
        return original(self, x, **options)

    monkeypatch.setattr(Quantizer, "record", counting)
    return found


# A stack, one expert after another


@pytest.fixture
def one_by_one(monkeypatch):
    monkeypatch.setattr(grouped_linear, "why_one_by_one", lambda *_: "for a test")


of_parts = partial(nodes.assert_same, native, "_layer")


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_one_by_one(device, kind, bias, quantized):
    """But for what has no tokens Python quantizes the weights, in one call, and nothing else."""
    case = Case(device, stacked=True, kind=kind, bias=bias)
    layer, x = case.layer(), case.x()
    quantized.clear()
    case.call(layer, x).backward(case.grad)
    of_weights = [] if kind == "primary" else [(4, 48, 64)]
    assert [shape for shape in quantized if shape[0]] == of_weights
    of_parts(case.run)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("kind", ["primary", "cached"])
def test_a_stack_one_by_one_that_is_written_to_in_between(device, kind):
    case = Case(device, stacked=True, kind=kind)

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

    of_parts(run)


@pytest.mark.usefixtures("one_by_one")
def test_a_stack_one_by_one_adds_to_main_grad(device):
    case = Case(device, stacked=True, fuse_wgrad_accumulation=True)

    def run():
        layer, x = case.layer(), case.x()
        layer.weight.main_grad = torch.ones(4, 48, 64, device=device)
        torch.manual_seed(7)
        case.call(layer, x).backward(case.grad)
        return {**gradients_of(layer, x), "main_grad": layer.weight.main_grad}

    of_parts(run)
