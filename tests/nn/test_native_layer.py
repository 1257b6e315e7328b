"""Layers of an NVFP4 recipe that C++ multiplies: they give the bytes of the products in Python, to which they
leave what is not plain.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
import weakref

import pytest
import torch
from cases import nodes
from cases.gradient_places import memory_of
from cases.layers import RECIPES
from cases.nodes import gradients_of
from cases.nodes import layers_by_both as by_both
from cases.nodes import layers_same as assert_same
from helpers import assert_bytes_equal
from tensor_helpers import DTYPES, VIEWS, values
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.nn import Linear, NVFP4Recipe, autocast, quantize_input
from zerofp4.tensors import Quantizer

OTHERS = ["nvfp4, weights 1x16", "nvfp4, dequantized", "mxfp8", "mxfp8, dequantized"]
EXACT = {
    name: dataclasses.replace(recipe, backend="exact")
    for name, recipe in RECIPES.items()
    if name not in OTHERS
}
SHAPES = {"2D": (6, 80), "3D": (2, 3, 80), "1D": (80,), "odd": (17, 80), "one row": (1, 80)}
WEIGHTS = ["primary", "cached", "of the call"]


class Case:
    """A layer and its inputs, made anew for each run, since both runs leave gradients in them. Random numbers
    of the backward pass are those after manual_seed(7).
    """

    def __init__(self, device, x=(6, 80), *, dtype=torch.bfloat16, kind="primary", frozen=(), **options):
        self.options = {"dtype": dtype, "device": device, **options}
        self.shape, self.device, self.dtype, self.frozen, self.kind = x, device, dtype, frozen, kind
        self.recipe = NVFP4Recipe(backend="exact")
        self.is_first = True if kind == "cached" else None
        self.grad = values(*x[:-1], 48, device=device, dtype=dtype, seed=3)

    def layer(self) -> Linear:
        torch.manual_seed(1)
        made = Linear(80, 48, primary_weights=self.kind == "primary", **self.options)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return made

    def x(self) -> torch.Tensor:
        made = values(*self.shape, device=self.device, dtype=self.dtype)
        return made.requires_grad_("x" not in self.frozen)

    def call(self, layer, x) -> torch.Tensor:
        with autocast(self.recipe):
            return layer(x, self.is_first)

    def run(self) -> dict[str, torch.Tensor | None]:
        layer, x = self.layer(), self.x()
        y = self.call(layer, x)
        if y.requires_grad:
            torch.manual_seed(7)
            y.backward(self.grad)
        return {"y": y, **gradients_of(layer, x)}


# Bytes


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes(device, shape, kind, name):
    case = Case(device, SHAPES[shape], kind=kind)
    case.recipe = EXACT[name]
    assert_same(case.run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_dtypes(device, bias, dtype):
    case = Case(device, bias=bias, dtype=dtype)
    assert_same(case.run)


@pytest.mark.parametrize(
    "frozen", ["", "x", "weight", "bias", "x weight", "weight bias", "x bias", "x weight bias"]
)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_is_frozen(device, kind, frozen):
    assert_same(Case(device, kind=kind, frozen=frozen.split()).run)


@pytest.mark.parametrize("view", VIEWS)
def test_memory_out_of_order(device, view):
    case = Case(device, (34, 80))

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, VIEWS[view](x))
        y.sum().backward()  # a gradient of one element
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)


def test_weights_of_four_over_six(device):
    """Their e4m3_max is in the products of both passes, also where Python goes back."""
    case = Case(device)

    def run(**options):
        layer, x = case.layer(), case.x()
        value = zerofp4.quantize(values(48, 80, device=device), four_over_six=zerofp4.FourOverSix(256))
        layer.weight = nn.Parameter(value)
        y = case.call(layer, x)
        torch.manual_seed(7)
        found = torch.autograd.grad(y, [x, layer.weight], case.grad, **options)
        return {"y": y, **dict(zip(("x", "weight"), found, strict=True))}

    assert_same(run)
    for name, tensor in run(create_graph=True).items():
        assert_bytes_equal(tensor.detach(), run()[name].detach(), name)


def test_python_quantizes_nothing(device, monkeypatch):
    """Nor does the thread of a GPU that goes back through the graph."""
    case, found, original = Case(device), [], Quantizer.record

    def counting(self, x, **options):
        found.append(x.shape)
        return original(self, x, **options)

    layer, x = case.layer(), case.x()
    monkeypatch.setattr(Quantizer, "record", counting)
    made, expected = by_both(lambda: (case.call(layer, x).backward(case.grad), len(found))[1])
    assert (made, expected) == (0, 2)


def test_without_gradients(device):
    case = Case(device)
    with torch.no_grad():
        assert_same(lambda: {"y": case.call(case.layer(), case.x())})


def test_no_gradient_at_all(device):
    """Autograd functions in Python get zeros for it."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        Nothing.apply(case.call(layer, x)).backward(case.grad)
        return gradients_of(layer, x)

    assert_same(run)


def test_micro_batches_with_one_cached_weight(device):
    case = Case(device, kind="cached")

    def run():
        layer, x = case.layer(), case.x()
        torch.manual_seed(7)
        for first in (True, False, False):
            with autocast(case.recipe):
                layer(x, first).backward(case.grad)
        return gradients_of(layer, x)

    assert_same(run)


# What autograd does around it


def test_hooks(device):
    case, seen = Case(device), []

    def run():
        layer, x = case.layer(), case.x()
        for name, leaf in {"x": x, **dict(layer.named_parameters())}.items():
            leaf.register_hook(lambda grad, name=name: seen.append(name) or 2 * grad)
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: seen.append(f"{name}.grad"))
        y = case.call(layer, x)
        y.grad_fn.register_hook(lambda gradients, _: seen.append("node"))
        y.grad_fn.register_prehook(lambda gradients: tuple(grad / 2 for grad in gradients))
        torch.manual_seed(7)
        y.backward(case.grad)
        return gradients_of(layer, x)

    assert_same(run)
    assert seen[:7] == seen[7:] and len(seen) == 14


@pytest.mark.parametrize("times", [1, 2])
def test_gradient_places(device, times):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        memory = memory_of([layer.weight, layer.bias])
        torch.manual_seed(7)
        for _ in range(times):
            case.call(layer, x).backward(case.grad)
        assert layer.weight.grad.data_ptr() == memory.views[0].data_ptr()
        return {**gradients_of(layer, x), "memory": memory.views[0]}

    assert_same(run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad(device, dtype):
    case = Case(device, dtype=dtype, fuse_wgrad_accumulation=True)

    def run():
        layer, x = case.layer(), case.x()
        layer.weight.main_grad = torch.ones(48, 80, device=device)
        layer.weight.grad_added_to_main_grad = False
        torch.manual_seed(7)
        case.call(layer, x).backward(case.grad)
        assert layer.weight.grad_added_to_main_grad
        return {**gradients_of(layer, x), "main_grad": layer.weight.main_grad}

    assert_same(run)


@pytest.mark.parametrize(
    "buffer",
    [None, torch.ones(48, 79), torch.ones(48, 80).half(), torch.ones(80, 48).t()],
    ids=["none", "another size", "another dtype", "out of order"],
)
def test_a_wrong_main_grad_is_the_same_error(device, buffer):
    case = Case(device, fuse_wgrad_accumulation=True)

    def run():
        layer, x = case.layer(), case.x()
        if buffer is not None:
            layer.weight.main_grad = buffer.to(device)
        with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
            case.call(layer, x).backward(case.grad)
        return f"{error.type.__name__}: {error.value}"

    made, expected = by_both(run)
    assert made == expected and ("main_grad" in made or "accumulate_into" in made)


def test_what_is_saved(device):
    """Of x its columnwise copy, of the weight its rows: three buffers each."""
    case, saved = Case(device, frozen=["bias"]), []
    layer, x = case.layer(), case.x()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor.clone()
    ):
        y = case.call(layer, x)
    torch.manual_seed(7)
    y.backward(case.grad)
    assert saved == [(80, 8), (80, 1), (1,), (48, 40), (3, 5), (1,)]
    assert_bytes_equal(x.grad, case.run()["x"], "gradient of x")


def test_checkpoint(device):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        with autocast(case.recipe):
            y = checkpoint(lambda x: F.gelu(layer(x)), x, use_reentrant=False)
            torch.manual_seed(7)
            y.backward(case.grad)
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)


def test_a_checkpoint_computes_no_product_that_nothing_needs():
    """What is saved is so in front of the product, which is not computed again."""
    case = Case(torch.device("cpu"))
    layer, x = case.layer(), case.x()

    def call():
        with autocast(case.recipe):
            checkpoint(layer, x, use_reentrant=False).backward(case.grad)

    assert nodes.count_calls(call, "aten::mm", "aten::addmm") == 3


@pytest.mark.parametrize("kind", ["primary", "cached"])
def test_a_weight_that_is_written_to_in_between(device, kind):
    case = Case(device, kind=kind)

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, x)
        with torch.no_grad():
            layer.weight.copy_(values(48, 80, device=device, seed=9))
        if kind == "cached":
            case.call(layer, x)
        with pytest.raises(RuntimeError, match=r"written to between|modified by an inplace"):
            y.backward(case.grad)
        return {}

    by_both(run)


@pytest.mark.parametrize(("kind", "frozen"), [("primary", ()), ("cached", ("weight", "bias"))])
def test_backward_twice(device, kind, frozen):
    case = Case(device, kind=kind, frozen=frozen)

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


def test_a_gradient_of_a_gradient_is_refused(device):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        y = case.call(layer, x)
        torch.manual_seed(7)
        grad = case.grad.clone().requires_grad_()
        found = torch.autograd.grad(y, [x, *layer.parameters()], grad, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            found[0].sum().backward()
        return dict(zip(("x", "weight", "bias"), found, strict=True))

    assert_same(run)


@pytest.mark.parametrize("before_forward", [True, False])
def test_codes_that_were_freed(device, before_forward):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        storage = layer.weight.rowwise_data.untyped_storage()
        if before_forward:
            storage.resize_(0)
        with pytest.raises(RuntimeError, match="bytes of its storage, which has 0: it was freed") as error:
            y = case.call(layer, x)
            storage.resize_(0)
            y.backward(case.grad)
        return str(error.value)

    made, expected = by_both(run)
    assert made == expected


@pytest.mark.parametrize("shape", [(4, 32), (5, 79), ()], ids=["another size", "an odd size", "no dimension"])
def test_a_wrong_shape_is_the_same_error(device, shape):
    case = Case(device)

    def run():
        with pytest.raises(ValueError) as error:
            case.call(case.layer(), torch.zeros(shape, device=device))
        return str(error.value)

    made, expected = by_both(run)
    assert made == expected


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_a_tangent_is_refused(device, name):
    layer, x = Case(device, kind="of the call").layer(), values(6, 80, device=device)
    with forward_ad.dual_level(), autocast(RECIPES[name]):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer(forward_ad.make_dual(x, x))


def test_no_rows(device):
    case = Case(device, (0, 80))
    assert_same(case.run)


def test_nothing_outlives_the_graph(device):
    case = Case(device)
    layer, x = case.layer(), case.x()
    y = case.call(layer, x)
    node, gone = y.grad_fn, weakref.ref(layer.weight)
    assert node.next_functions[1][0].variable is layer.weight
    del layer
    gc.collect()
    assert gone() is not None
    del y, node
    gc.collect()
    assert gone() is None


# torch's autocast


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(device, dtype, where):
    case = Case(device, dtype=dtype)

    def run():
        layer, x = case.layer(), case.x()
        with torch.autocast(device.type, torch.bfloat16, enabled=where != "backward"):
            y = case.call(layer, x)
        torch.manual_seed(7)
        with torch.autocast(device.type, torch.bfloat16, enabled=where != "forward"):
            y.backward(case.grad.to(y.dtype))
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)


# What is not plain


class Subclass(torch.Tensor):
    """With nothing of its own."""


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_an_input_that_is_quantized_already(device):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        with autocast(case.recipe):
            y = layer(quantize_input(x))
        torch.manual_seed(7)
        y.backward(case.grad)
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)
    for name, tensor in run().items():
        assert_bytes_equal(tensor.detach(), case.run()[name].detach(), name)


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_a_dispatch_mode(device, where):
    case = Case(device)

    def run():
        layer, x = case.layer(), case.x()
        if where == "backward":
            y = case.call(layer, x)
        else:
            with Mode():
                y = case.call(layer, x)
        torch.manual_seed(7)
        if where == "forward":
            y.backward(case.grad)
        else:
            with Mode():
                y.backward(case.grad)
        return {"y": y, **gradients_of(layer, x)}

    assert_same(run)


def test_an_input_of_another_class(device):
    case = Case(device)
    y = case.call(case.layer(), case.x().as_subclass(Subclass))
    assert_bytes_equal(y.detach().as_subclass(torch.Tensor), case.run()["y"].detach(), "y")


def test_inference_mode(device):
    case = Case(device)

    def run():
        with torch.inference_mode():
            y = case.call(case.layer(), case.x())
            assert y.is_inference()
            return {"y": y.clone()}

    assert_same(run)


def test_compiled_autograd_hears_what_to_do(device):
    case = Case(device)
    y = case.call(case.layer(), case.x())
    compiler = torch.compile(backend="eager")
    with compiled_autograd._enable(compiler), pytest.raises(RuntimeError, match="compile its forward pass"):
        y.backward(case.grad)


def test_threads_with_one_layer(device):
    """One asks for a tangent while another makes the node of a gradient, which needs the GIL."""
    case = Case(device)
    layer, x = case.layer(), case.x()
    expected, found = case.call(layer, x).detach(), []

    def compute():
        for _ in range(1000):
            y = case.call(layer, x)
        y.backward(case.grad)
        found.append(y.detach())

    threads = [threading.Thread(target=compute) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(found) == 3
    for y in found:
        assert_bytes_equal(y, expected, "outputs")
