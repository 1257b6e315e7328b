"""What autograd does with layers of an NVFP4 recipe, linear ones and groups that are multiplied at once, and
with F.linear by an NVFP4 weight, which has a node of its own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from cases.frames import frames
from cases.gradient_places import memory_of
from cases.nodes import Mode, assert_named_equal, count_calls, gradients_of, run_in_threads
from helpers import assert_bytes_equal
from tensor_helpers import VIEWS, values
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import zerofp4
from zerofp4.nn import GroupedLinear, Linear, NVFP4Recipe, autocast, grouped_linear
from zerofp4.tensors import grouped

pytestmark = pytest.mark.usefixtures("multiplied_at_once")

LAYERS = ["Linear", "GroupedLinear"]
WEIGHTS = ["primary", "cached", "of the call"]
ROWS, SPLITS = 36, [16, 0, 17, 3]
of_both = pytest.mark.parametrize("name", LAYERS)
of_all = pytest.mark.parametrize("name", [*LAYERS, "F.linear"])
EVERY = [*itertools.product(LAYERS, WEIGHTS), ("F.linear", "primary")]
of_every_kind = pytest.mark.parametrize(("name", "kind"), EVERY)


class Case:
    """A layer [48, 64], or 4 of them in groups, and its inputs, made anew for each run. Random numbers of the
    backward pass are those after manual_seed(7). F.linear is a layer of torch by no recipe.
    """

    def __init__(self, device, name="Linear", *, kind="primary", frozen=(), **options):
        self.device, self.name, self.kind, self.frozen = device, name, kind, frozen
        self.options = {"dtype": torch.bfloat16, "device": device, **options}
        self.first = True if kind == "cached" else None
        self.splits = SPLITS if name == "GroupedLinear" else None
        self.grad = values(ROWS, 48, device=device, seed=3)

    def layer(self) -> nn.Module:
        torch.manual_seed(1)
        options = {"primary_weights": self.kind == "primary", **self.options}
        if self.name == "F.linear":
            made = nn.Linear(64, 48, **self.options)
            made.weight = nn.Parameter(zerofp4.quantize(made.weight.detach(), columnwise=True))
        elif self.name == "Linear":
            made = Linear(64, 48, **options)
        else:
            made = GroupedLinear(len(self.splits), 64, 48, **options)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return made

    def x(self) -> torch.Tensor:
        return values(ROWS, 64, device=self.device).requires_grad_("x" not in self.frozen)

    def context(self) -> contextlib.AbstractContextManager:
        if self.name == "F.linear":
            return contextlib.nullcontext()
        return autocast(NVFP4Recipe(backend="exact"))

    def call(self, layer, x) -> torch.Tensor:
        with self.context():
            if self.name == "F.linear":
                return layer(x)
            return layer(x, *([] if self.splits is None else [self.splits]), self.first)

    def back(self, y, **options) -> None:
        torch.manual_seed(7)
        y.backward(self.grad, **options)

    def run(self) -> dict[str, torch.Tensor | None]:
        layer, x = self.layer(), self.x()
        y = self.call(layer, x)
        if y.requires_grad:
            self.back(y)
        return {"y": y, **gradients_of(layer, x)}


@of_both
def test_the_bytes_do_not_depend_on_who_keeps_the_weight(device, name):
    expected = Case(device, name, kind="of the call").run()
    for kind in ("primary", "cached"):
        assert_named_equal(Case(device, name, kind=kind).run(), expected)


@of_every_kind
@pytest.mark.parametrize(
    "frozen", ["x", "weight", "bias", "x weight", "weight bias", "x bias", "x weight bias"]
)
def test_what_is_frozen_changes_no_other_gradient(device, kind, frozen, name):
    expected = Case(device, name, kind=kind).run()
    expected |= dict.fromkeys(frozen.split())
    assert_named_equal(Case(device, name, kind=kind, frozen=frozen.split()).run(), expected)


@of_both
@pytest.mark.parametrize("view", [view for view in VIEWS if view != "of three dimensions"])
def test_memory_out_of_order(device, name, view):
    case, found = Case(device, name), []
    given = VIEWS[view](values(ROWS, 48, device=device, seed=3))
    for change in (VIEWS[view], lambda x: VIEWS[view](x).contiguous()):
        layer, x = case.layer(), case.x()
        y = case.call(layer, change(x))
        case.grad = given if change is VIEWS[view] else given.contiguous()
        case.back(y)
        found.append({"y": y, **gradients_of(layer, x)})
    assert_named_equal(*found)


@of_both
def test_weights_of_four_over_six(device, name):
    """Their e4m3_max is in the products of both passes: without it these would be 1.75 times as large."""
    case = Case(device, name)
    layer, x = case.layer(), case.x()
    weight = values(*layer.weight.shape, device=device)
    layer.weight = nn.Parameter(zerofp4.quantize(weight, four_over_six=zerofp4.FourOverSix(256)))
    y = case.call(layer, x)
    case.back(y)
    found, x.grad = [y, x.grad], None
    y = layer(x, *([] if case.splits is None else [case.splits]))  # by no recipe
    case.back(y)
    for mine, other in zip(found, (y, x.grad), strict=True):
        assert (mine - other).norm() <= 0.3 * other.norm()


@of_both
@pytest.mark.parametrize("kind", WEIGHTS)
def test_python_quantizes_nothing(device, quantized, kind, name):
    """But a weight that is cached. Nor does the thread of a GPU that goes back through the graph."""
    case = Case(device, name, kind=kind)
    layer, x = case.layer(), case.x()
    case.call(layer, x)
    case.first = False if kind == "cached" else None
    quantized.clear()
    case.back(case.call(layer, x))
    assert quantized == []


@pytest.mark.parametrize("kind", WEIGHTS)
def test_frames_of_this_package(kind):
    """On the CPU, where the backward pass runs in the thread that asks for it. They do not depend on the
    number of experts.
    """
    found = []
    for experts in (4, 12):
        case = Case("cpu", "GroupedLinear", kind=kind)
        case.splits = torch.tensor([ROWS // experts] * experts)
        layer, outputs = case.layer(), []
        for first in (True, False, False) if kind == "cached" else (None,) * 3:
            case.first, x = first, case.x()
            forward = frames(lambda: outputs.append(case.call(layer, x)))  # noqa: B023
            backward = frames(lambda: case.back(outputs.pop()))  # noqa: B023
        backward.pop("test_layer_autograd.py: back", None)
        found.append((forward.total(), backward.total()))
    assert found[0] == found[1] and found[0][0] <= 76 and found[0][1] <= 14


# What autograd does around it


@of_all
def test_hooks(device, name):
    case, seen = Case(device, name), []
    layer, x = case.layer(), case.x()
    for key, leaf in {"x": x, **dict(layer.named_parameters())}.items():
        leaf.register_hook(lambda grad, key=key: seen.append(key) or 2 * grad)
        leaf.register_post_accumulate_grad_hook(lambda leaf, key=key: seen.append(f"{key}.grad"))
    y = case.call(layer, x)
    y.grad_fn.register_hook(lambda gradients, _: seen.append("node"))
    y.grad_fn.register_prehook(lambda gradients: tuple(grad / 2 for grad in gradients))
    case.back(y)
    assert seen[0] == "node" and sorted(seen[1:]) == sorted(
        f"{key}{of}" for key in ("x", "weight", "bias") for of in ("", ".grad")
    )
    assert_named_equal({"y": y, **gradients_of(layer, x)}, case.run())  # halves, doubled


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", ["Linear", "F.linear"])
def test_gradient_places(device, name, times):
    case = Case(device, name)
    layer, x, expected = case.layer(), case.x(), case.run()
    memory = memory_of([layer.weight, layer.bias])
    for _ in range(times):
        case.back(case.call(layer, x))
    assert layer.weight.grad.data_ptr() == memory.views[0].data_ptr()
    for key, grad in gradients_of(layer, x).items():
        assert_bytes_equal(grad, times * expected[key], key)


@pytest.mark.parametrize(
    ("name", "buffer", "message"),
    [
        *((name, None, r"weight\.main_grad, which is not there") for name in LAYERS),
        ("Linear", torch.ones(48, 63), "main_grad|accumulate_into"),
        ("Linear", torch.ones(48, 64).half(), "main_grad|accumulate_into"),
        ("Linear", torch.ones(64, 48).t(), "main_grad|accumulate_into"),
        ("GroupedLinear", torch.ones(4, 48, 63), "must match the size"),
    ],
    ids=["none", "none, groups", "another size", "another dtype", "out of order", "another size, groups"],
)
def test_a_wrong_main_grad(device, name, buffer, message):
    case = Case(device, name, fuse_wgrad_accumulation=True)
    layer, x = case.layer(), case.x()
    if buffer is not None:
        layer.weight.main_grad = buffer.to(device)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        case.back(case.call(layer, x))


SAVED = {
    "Linear": [(64, 24), (64, 3), (1,), (48, 32), (3, 4), (1,)],
    # 36 and 15 rows for each group, up to a multiple of 16.
    "GroupedLinear": [(64 * 96 // 2,), (64 * 96 // 16,), (4,), (4, 48, 32), (4, 3, 4), (4,)],
}


@of_both
def test_what_is_saved(device, name):
    """Of x its columnwise copy, of a weight that is quantized for the call its rows: three buffers each."""
    case, saved = Case(device, name, kind="of the call", frozen=["bias"]), []
    layer, x = case.layer(), case.x()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor.clone()
    ):
        y = case.call(layer, x)
    case.back(y)
    assert saved == SAVED[name]
    assert_bytes_equal(x.grad, case.run()["x"], "gradient of x")


@of_all
def test_checkpoint(device, name):
    """What is saved is so before the product, which is not computed again if nothing needs it."""
    case = Case(device, name)
    layer, x = case.layer(), case.x()
    given = [] if case.splits is None else [case.splits]

    def products(run) -> int:
        layer.zero_grad()
        x.grad = None
        return count_calls(lambda: case.back(run(x, *given)), "aten::mm", "aten::addmm", "aten::_grouped_mm")

    with case.context():
        found = products(partial(checkpoint, layer, use_reentrant=False))
        gradients = {key: grad.clone() for key, grad in gradients_of(layer, x).items()}
        assert found == products(layer) and (device.type == "cuda" or found > 0)
    assert_named_equal(gradients, gradients_of(layer, x))


@pytest.mark.parametrize(("name", "kind"), [case for case in EVERY if case[1] != "of the call"])
def test_a_weight_that_is_written_to_in_between(device, kind, name):
    case = Case(device, name, kind=kind)
    layer, x = case.layer(), case.x()
    y = case.call(layer, x)
    with torch.no_grad():
        layer.weight.copy_(values(*layer.weight.shape, device=device, seed=9))
    if kind == "cached":
        case.call(layer, x)
    with pytest.raises(RuntimeError, match=r"written to between|modified by an inplace"):
        case.back(y)


def test_splits_that_are_written_to_in_between(device, monkeypatch):
    """As a loop does that has one buffer for them: other rows would be those of an expert. On the CPU with
    what a GPU does, which reads the caller's.
    """
    case = Case(device, "GroupedLinear")
    case.splits = splits = torch.tensor(SPLITS, device=device)
    monkeypatch.setattr(grouped, "host_sizes", lambda *_: None)
    monkeypatch.setattr(grouped_linear, "sizes_on", lambda *_: splits)
    y = case.call(case.layer(), case.x())
    splits.copy_(torch.tensor([3, 17, 0, 16]))
    with pytest.raises(RuntimeError, match=r"m_splits was written to|modified by an inplace"):
        case.back(y)


@of_every_kind
def test_backward_twice(device, kind, name):
    case = Case(device, name, kind=kind)
    layer, x, expected = case.layer(), case.x(), case.run()
    y = case.call(layer, x)
    case.back(y, retain_graph=True)
    case.back(y)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        case.back(y)
    for key, grad in gradients_of(layer, x).items():
        assert_bytes_equal(grad, 2 * expected[key], key)


@of_both
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_gradient_of_a_gradient_is_refused(device, kind, name):
    case = Case(device, name, kind=kind)
    layer, x, expected = case.layer(), case.x(), case.run()
    y = case.call(layer, x)
    torch.manual_seed(7)
    leaves, grad = {"x": x, **dict(layer.named_parameters())}, case.grad.clone().requires_grad_()
    found = torch.autograd.grad(y, list(leaves.values()), grad, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        found[0].sum().backward()
    assert_named_equal({"y": y, **dict(zip(leaves, found, strict=True))}, expected)


@pytest.mark.parametrize("before_forward", [True, False])
@pytest.mark.parametrize("name", ["Linear", "F.linear"])
def test_codes_that_were_freed(device, name, before_forward):
    case = Case(device, name)
    layer, x = case.layer(), case.x()
    storage = layer.weight.rowwise_data.untyped_storage()
    if before_forward:
        storage.resize_(0)
    with pytest.raises(RuntimeError, match="bytes of its storage, which has 0: it was freed"):
        y = case.call(layer, x)
        storage.resize_(0)
        case.back(y)


@of_all
def test_nothing_outlives_the_graph(device, name):
    case = Case(device, name)
    layer, x = case.layer(), case.x()
    y, gone = case.call(layer, x), weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert gone() is not None
    del y
    gc.collect()
    assert gone() is None


@of_both
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_torch_autocast(device, where, name):
    """It gives the dtype of x, and changes nothing of a backward pass."""
    case = Case(device, name, kind="of the call", dtype=torch.float32)
    expected = Case(device, name, kind="of the call", dtype=torch.float32)
    layer, x = case.layer(), case.x()
    with torch.autocast(device.type, torch.bfloat16, enabled=where != "backward"):
        y = case.call(layer, x.float() if where != "backward" else x)
    torch.manual_seed(7)
    with torch.autocast(device.type, torch.bfloat16, enabled=where != "forward"):
        y.backward(case.grad)
    assert y.dtype == torch.bfloat16
    assert_named_equal({"y": y, **gradients_of(layer, x)}, expected.run())


# What is not plain


class Subclass(torch.Tensor):
    """With nothing of its own."""


@of_every_kind
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_dispatch_mode(device, where, kind, name):
    case = Case(device, name, kind=kind)
    layer, x = case.layer(), case.x()
    if where == "backward":
        y = case.call(layer, x)
        with Mode():
            case.back(y)
    else:
        with Mode():
            y = case.call(layer, x)
        case.back(y)
    assert_named_equal({"y": y, **gradients_of(layer, x)}, case.run())


@pytest.mark.parametrize("name", ["Linear", "F.linear"])
def test_an_input_of_another_class(device, name):
    case = Case(device, name)
    y = case.call(case.layer(), case.x().as_subclass(Subclass))
    assert_bytes_equal(y.detach().as_subclass(torch.Tensor), case.run()["y"].detach(), "y")


@of_both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, mode, name):
    case = Case(device, name)
    with mode():
        y = case.call(case.layer(), case.x()).clone()
    assert_bytes_equal(y, case.run()["y"].detach(), "y")


@of_all
def test_compiled_autograd_hears_what_to_do(device, name):
    case = Case(device, name)
    y = case.call(case.layer(), case.x())
    compiler = torch.compile(backend="eager")
    heard = "without it" if name == "F.linear" else "compile its forward pass"
    with compiled_autograd._enable(compiler), pytest.raises(RuntimeError, match=heard):
        y.backward(case.grad)


@pytest.mark.parametrize("name", ["Linear", "F.linear"])
def test_threads_with_one_layer(device, name):
    """One asks for a tangent while another makes the node of a gradient, which needs the GIL."""
    case = Case(device, name)
    layer, x = case.layer(), case.x()
    expected = case.call(layer, x).detach()

    def compute():
        for _ in range(1000):
            y = case.call(layer, x)
        y.backward(case.grad)
        return y.detach()

    for y in run_in_threads(compute):
        assert_bytes_equal(y, expected, "outputs")
