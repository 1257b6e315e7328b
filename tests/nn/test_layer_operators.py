"""zerofp4::linear and zerofp4::linear_gradients, of linear layers and of groups: C++ gives the bytes of their
implementations in Python, which do what is not plain, and runs next to no Python.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from cases.frames import TORCH, frames
from cases.layers import RECIPES
from cases.nodes import assert_each_same
from helpers import assert_bytes_equal, poisoned_allocations
from tensor_helpers import DTYPES, values
from torch import nn

import zerofp4
from zerofp4.nn import GroupedLinear, Linear, autocast
from zerofp4.nn.operators import _linear, _linear_gradients
from zerofp4.storage import BUFFERS

pytestmark = pytest.mark.usefixtures("multiplied_at_once")

PYTHON = ["nvfp4, weights 1x16", "nvfp4, dequantized", "mxfp8", "mxfp8, dequantized"]
EXACT = {name: dataclasses.replace(recipe, backend="exact") for name, recipe in RECIPES.items()}
KINDS = ["primary", "cached", "of the call"]
LAYERS = ["Linear", "GroupedLinear"]
SPLITS = (16, 0, 17, 3)
NEAREST = {"nvfp4": {"stochastic_rounding": False}}
FORWARD, BACKWARD = torch.ops.zerofp4.linear, torch.ops.zerofp4.linear_gradients


class Call:
    """The arguments of both operators by name, of a layer [48, 80] or one of groups of those."""

    def __init__(
        self,
        device,
        recipe=EXACT["nvfp4"],
        *,
        kind="of the call",
        name="Linear",
        splits=SPLITS,
        tokens=36,
        **more,
    ):
        with autocast(recipe):  # which makes its key known
            pass
        dtype = more.get("dtype", torch.bfloat16)
        options = {"device": device, "dtype": dtype}
        is_linear = name == "Linear"
        of_x = options if is_linear else options | {"dtype": torch.bfloat16}
        self.grad, self.x = values(tokens, 48, seed=3, **of_x), values(tokens, 80, **of_x)
        torch.manual_seed(1)
        primary = {"primary_weights": kind == "primary"}
        made = (
            Linear(80, 48, **primary, **options)
            if is_linear
            else GroupedLinear(len(splits), 80, 48, **primary, **options)
        )
        self.layer, self.splits = made, None if is_linear else torch.tensor(splits, device=device)
        weight = made.weight
        self.weight = {
            "weight": weight.detach(),
            "primary": [],
            "dtype": dtype,
            "e4m3_max": 448,
            "recipe": recipe.key,
            "cache": made._weight_cache.handle if kind == "cached" else None,
        }
        if kind == "primary":
            self.weight |= {"weight": None, "primary": [weight.record.buffer(name) for name in BUFFERS]}
        self.bias, self.x_needs, self.weight_needs = made.bias.detach(), True, True
        if kind == "cached":
            torch.ops.zerofp4.cache_weight(made._weight_cache.handle, weight.detach(), recipe.key, True)
            self.weight["weight"] = weight.detach()

    def forward(self, run) -> list[torch.Tensor]:
        needs = self.x_needs, self.weight_needs
        return run(self.x, [], self.splits, self.bias, *self.weight.values(), None, *needs)

    def backward(self, run, kept: list[torch.Tensor], out=None) -> list[torch.Tensor]:
        """kept: what forward() gave after y. out: float32, to which the weight's gradient is added."""
        groups = [] if self.splits is None else [self.splits, *kept[:2]]
        kept = kept[2:] if groups else kept
        count = (
            0 if not self.weight_needs else len(kept) if len(kept) < 4 else 3 if groups else len(kept) // 2
        )
        x, own = kept[:count], kept[count:]
        weight = self.weight if not own else self.weight | {"weight": None}
        torch.manual_seed(7)
        needs = self.x.dtype, self.x_needs, self.bias is not None
        return list(run(self.grad, groups, x, 80, own, *weight.values(), out, out is not None, *needs))

    def assert_same(self) -> None:
        """Both operators and both implementations in Python give the same."""
        with poisoned_allocations():
            made, expected = self.forward(FORWARD), self.forward(_linear)
        assert_each_same(made, expected, "forward")
        with poisoned_allocations():
            found = self.backward(BACKWARD, made[1:])
            assert_each_same(found, self.backward(_linear_gradients, expected[1:]), "backward")
        needs = [self.x_needs, self.weight_needs, self.bias is not None]
        assert [each.numel() > 0 for each in found] == needs

    def run_both(self) -> None:
        self.backward(BACKWARD, self.forward(FORWARD)[1:])


# Bytes


@pytest.mark.parametrize("recipe", [name for name in EXACT if name not in PYTHON])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes(device, kind, recipe, quantized):
    for tokens in (6, 32, *((1, 17) if EXACT[recipe].hadamard else ())):
        call = Call(device, EXACT[recipe], kind=kind, tokens=tokens)
        quantized.clear()
        call.run_both()
        assert quantized == []
        call.assert_same()


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4, no transform"])
@pytest.mark.parametrize("splits", [SPLITS, (0, 0, 36, 0), (9, 9, 9, 9)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_groups(device, kind, splits, recipe, quantized):
    call = Call(device, EXACT[recipe], kind=kind, name="GroupedLinear", splits=splits)
    quantized.clear()
    call.run_both()
    assert quantized == []
    call.assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_dtypes(device, name, bias, dtype, quantized):
    call = Call(device, dtype=dtype, name=name)
    call.bias = call.bias if bias else None
    call.run_both()
    assert quantized == []
    call.assert_same()


@pytest.mark.parametrize(("x_needs", "weight_needs"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_needs_no_gradient(device, name, kind, x_needs, weight_needs):
    call = Call(device, kind=kind, name=name)
    call.x_needs, call.weight_needs = x_needs, weight_needs
    call.assert_same()


@pytest.mark.parametrize(
    ("name", "block", "columnwise"),
    [
        *(("Linear", block, columnwise) for block in ((16, 16), (1, 16)) for columnwise in (True, False)),
        ("GroupedLinear", (16, 16), False),
    ],
)
def test_primary_weights_of_four_over_six(device, name, block, columnwise, quantized):
    """Their rows are read, but of blocks of 1x16 the columns, where there are some: by Python."""
    recipe = dataclasses.replace(EXACT["nvfp4"], weight_block=block)
    call = Call(device, recipe, kind="primary", name=name)
    options = {"block": block, "columnwise": columnwise, "four_over_six": zerofp4.FourOverSix(256)}
    record = zerofp4.quantize(values(*call.layer.weight.shape, device=device), **options).record
    call.weight |= {"primary": [record.buffer(name) for name in BUFFERS], "e4m3_max": 256}
    quantized.clear()
    call.run_both()
    assert (quantized != []) == (columnwise and block == (1, 16))
    call.assert_same()


@pytest.mark.parametrize("name", LAYERS)
def test_results_share_no_memory(device, name):
    """As the schema says. Compiled code frees and reuses the memory of one alone."""
    made = Call(device, name=name).forward(FORWARD)
    count = 7 if name == "Linear" else 9
    assert len({each.untyped_storage().data_ptr() for each in made}) == len(made) == count
    assert all(each.storage_offset() == 0 for each in made)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("GroupedLinear", "nvfp4"),
        *(("Linear", recipe) for recipe in ("nvfp4", "nvfp4, dequantized", "mxfp8")),
    ],
)
def test_opcheck(device, name, recipe):
    """Of all operators; without what compares results, which float8 has no operations for. Groups one after
    another are no operator.
    """
    call = Call(device, dataclasses.replace(EXACT[recipe], **NEAREST.get(recipe, {})), name=name)
    checks = ("test_autograd_registration", "test_faketensor")
    opcheck = torch.library.opcheck
    call.bias, call.weight["weight"] = call.layer.bias, call.layer.weight
    call.forward(lambda *given: opcheck(FORWARD.default, given, test_utils=checks))
    call.bias, call.weight["weight"] = call.bias.detach(), call.weight["weight"].detach()
    kept = call.forward(FORWARD)[1:]
    for out in (None, torch.zeros(call.layer.weight.shape, device=device)):
        call.backward(lambda *given: opcheck(BACKWARD.default, given, test_utils=checks[1:]), kept, out)
    given = call.layer._weight_cache.handle, call.weight["weight"], call.weight["recipe"], True
    opcheck(torch.ops.zerofp4.cache_weight.default, given, test_utils=checks[1:])


# What Python does


@pytest.mark.parametrize("kind", ["cached", "of the call"])
def test_groups_of_weights_in_blocks_of_1x16(device, kind, quantized):
    call = Call(device, EXACT["nvfp4, weights 1x16"], kind=kind, name="GroupedLinear")
    quantized.clear()
    call.run_both()
    assert (36, 80) in quantized and (36, 48) in quantized
    call.assert_same()


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(8)
    return tensor


WRONG = {
    "x of another size": lambda call: setattr(call, "x", call.x[:, :-8]),
    "x of another dtype": lambda call: setattr(call, "x", call.x.double()),
    "x that was freed": lambda call: setattr(call, "x", shrunk(call.x)),
    "a bias of another size": lambda call: setattr(call, "bias", call.bias[..., 1:]),
    "a weight of another dtype": lambda call: call.weight.update(weight=call.weight["weight"].double()),
    "a weight that was freed": lambda call: call.weight.update(weight=shrunk(call.weight["weight"])),
    "a recipe that nobody entered": lambda call: call.weight.update(recipe="other"),
    "a later micro-batch without a first": lambda call: call.weight.update(
        cache=call.layer._weight_cache.handle
    ),
}
WRONG_SPLITS = {
    "splits of another sum": lambda call: call.splits.fill_(8),
    "splits of floats": lambda call: setattr(call, "splits", call.splits.double()),
}


OF_EITHER = itertools.product(WRONG, LAYERS)
OF_GROUPS = ((what, "GroupedLinear") for what in WRONG_SPLITS)


@pytest.mark.parametrize(("what", "name"), [*OF_EITHER, *OF_GROUPS])
def test_what_is_wrong_is_said_as_python_says_it(what, name):
    call = Call("cpu", name=name)
    (WRONG | WRONG_SPLITS)[what](call)
    with pytest.raises((IndexError, KeyError, RuntimeError, TypeError, ValueError)) as expected:
        call.forward(_linear)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        call.forward(FORWARD)


# Compiled layers

OF_A_CALL = {"dequantize.py: neutral_amax", "device.py: wait"}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_frames_of_this_package(fresh_compiler, backend, name, kind):
    """On the CPU, where the backward pass runs in the thread that asks for it."""
    call = Call("cpu", kind=kind, name=name)
    outputs, splits = [], () if call.splits is None else (call.splits,)

    @torch.compile(fullgraph=True, backend=backend)
    def run(x, first):
        return call.layer(x, *splits, first)

    with autocast(EXACT["nvfp4"]):
        for first in (True, False, False) if kind == "cached" else (None,) * 3:
            x = call.x.clone().requires_grad_()
            forward = frames(lambda first=first: outputs.append(run(x, first)))  # noqa: B023
            backward = frames(lambda: outputs.pop().backward(call.grad))
    assert forward.pop("recipe.py: __getattr__") == 1  # a guard
    if TORCH < (2, 12):
        forward.pop("quantized_tensor.py: __torch_function__", None)
    if kind == "cached":
        assert forward.total() <= 32 and backward.total() <= 16
    else:
        assert set(forward) == set(backward) == OF_A_CALL
        assert set(forward.values()) == set(backward.values()) == {1}


# The cache, which graphs read and write


class Blocks(nn.Module):
    def __init__(self, count: int, device):
        super().__init__()
        torch.manual_seed(0)
        options = {"device": device, "dtype": torch.bfloat16}
        self.layers = nn.ModuleList(Linear(64, 64, **options) for _ in range(count))

    def forward(self, x, first=None, call=lambda layer, *given: layer(*given)):
        for layer in self.layers:
            x = torch.tanh(call(layer, x, first))
        return x


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_two_micro_batches_in_one_graph(fresh_compiler, device, backend):
    """The first one's output is used by nobody, and yet the second takes what it has left."""
    recipe, x = EXACT["nvfp4"], values(32, 64, device=device)

    def both(model, a, b):
        model(a, True)
        return model(b, False)

    model, other = Blocks(2, device), Blocks(2, device)
    run = torch.compile(both, fullgraph=True, backend=backend)
    with autocast(recipe):
        for _ in range(2):
            found = [run(model, x, x + 1), both(other, x, x + 1)]
            if backend == "aot_eager":
                assert_bytes_equal(found[0].detach(), found[1].detach(), "y")
            for each in (model, other):
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.mul_(1.5)
    assert all(layer._weight_cache.state is not None for layer in model.layers)


@pytest.mark.heavy
def test_one_block_compiled_for_twelve_layers(fresh_compiler, device):
    """Layers that are alike share a graph for each value of is_first_microbatch."""
    recipe, model, compiled = EXACT["nvfp4"], Blocks(12, device), []

    def counting(graph, inputs):
        compiled.append(1)
        return graph.forward

    def call(layer, x, first):
        return torch.tanh(layer(x, first))

    run = torch.compile(call, fullgraph=True, backend=counting)
    x, y = values(32, 64, device=device), values(32, 64, device=device)
    with autocast(recipe), torch.no_grad():
        for first in (True, False, False):
            for layer in model.layers:
                with torch.compiler.set_stance("default"):
                    x = run(layer, x, first)
                y = call(layer, y, None)
                assert_bytes_equal(x, y, "y")
    assert len(compiled) == 2


@pytest.mark.heavy
@pytest.mark.parametrize("first", [None, True])
def test_an_exported_program(device, first, tmp_path):
    """It keeps weights of its own, also where it was loaded."""
    recipe, model, x = EXACT["nvfp4"], Blocks(2, device), values(32, 64, device=device)
    with autocast(recipe), torch.no_grad():
        program = torch.export.export(model, (x, first))
        expected = model(x)
        model(x, True)
        loaded = program.module()
        for parameter in model.parameters():
            parameter.mul_(2)  # those of the program are these
        doubled = model(x)
        assert not torch.equal(doubled, expected)
        for each in (loaded, loaded):
            assert_bytes_equal(each(x, first), doubled, "y")
        torch.export.save(program, tmp_path / "program.pt2")
        again = torch.export.load(tmp_path / "program.pt2").module()
        for parameter in model.parameters():
            parameter.zero_()
        assert_bytes_equal(again(x, first), doubled, "y of a loaded program")
