"""Experts: what convert_model makes of modules like transformers' where a filter takes their weights."""

import copy
import dataclasses
import pickle

import pytest
import torch
from cases.layers import RECIPES
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4.nn import Experts, Linear, MXFP8Recipe, NVFP4Recipe, autocast
from zerofp4.nn.grouped_linear import why_one_by_one

COUNT, HIDDEN, INNER, TOKENS = 4, 64, 48, 36


class Plain(nn.Module):
    """What transformers writes, with what it says of the layout."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, device="cpu"):
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.1 * values(COUNT, 2 * INNER, HIDDEN, device=device))
        self.down_proj = nn.Parameter(0.1 * values(COUNT, HIDDEN, INNER, device=device, seed=1))
        self.act_fn = F.silu

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return self.by(hidden_states, top_k_index, top_k_weights, lambda x, name, e: F.linear(x, name[e]))

    def by(self, x, index, weights, product):
        out = torch.zeros_like(x)
        for e in range(COUNT):
            token, place = (index == e).nonzero(as_tuple=True)
            hidden = self._apply_gate(product(x[token], self.gate_up_proj, e))
            made = product(hidden, self.down_proj, e) * weights[token, place].unsqueeze(-1)
            out = out.index_add(0, token, made)
        return out


class Transposed(Plain):
    is_transposed = True


class Normed(Plain):
    has_post_expert_norm = True


class NotNormed(Plain):
    """As versions of transformers write it that know such a norm."""

    has_post_expert_norm = False


def takes_experts(module, name):
    return name.endswith("_proj")


def converted(device):
    model = nn.ModuleDict({"experts": Plain(device)})
    report = zerofp4.convert_model(model, takes_experts, layers=True)
    return model["experts"], report


def routed(device):
    """Tokens, two experts for each, of which the third gets none, and weights."""
    generator = torch.Generator().manual_seed(3)
    index = torch.tensor([0, 1, 3])[torch.rand(TOKENS, 3, generator=generator).argsort(dim=1)[:, :2]]
    weights = torch.rand(TOKENS, 2, generator=generator).bfloat16()
    return values(TOKENS, HIDDEN, device=device, seed=4), index.to(device), weights.to(device)


def elsewhere(x, index):
    """x and index with experts of other ranks: one of each token's, and all of some tokens, whose values are
    Inf, NaN and huge ones.
    """
    index, x = index.clone(), x.clone()
    index[:, 1] = COUNT
    index[::3] = COUNT
    x[0], x[3], x[6], x[9::3] = torch.inf, torch.nan, 1e30, 1000.0
    return x, index


def step(experts, x, index, weights, recipe, rows=slice(None)):
    """y of these rows, and the gradients of them, of the weights that they have, and of the experts."""
    gradient = values(*x.shape, device=x.device, seed=5)[rows]
    x, index, weights = x[rows], index[rows], weights[rows]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    with autocast(recipe):
        y = experts(x, index, weights)
    y.backward(gradient)
    return [y.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4, dequantized"])
def test_each_token_by_its_experts(name, parallel):
    """On the CPU, where one product comes after another: byte for byte those of layers of single experts.
    parallel: expert parallelism, where other ranks have experts, too.
    """
    experts, report = converted("cpu")
    assert report.layers == ["experts"] and report.converted == ["experts.gate_up_proj", "experts.down_proj"]
    x, index, weights = routed("cpu")
    if parallel:
        x, index = elsewhere(x, index)
    gradient = values(TOKENS, HIDDEN, seed=5)

    def product(x, weight, e):
        layer = Linear(weight.shape[2], weight.shape[1], bias=False)
        layer.weight = nn.Parameter(weight.detach()[e], requires_grad=False)
        return layer(x)

    results = []
    for run in (experts, lambda *arguments: Plain.by(experts, *arguments, product)):
        given = x.clone().requires_grad_()
        with autocast(NVFP4Recipe(stochastic_rounding=False, backward=RECIPES[name].backward)):
            y = run(given, index, weights)
        y.backward(gradient)
        results.append((y.detach(), given.grad))
    assert_all_equal(*results)
    assert experts.gate_up_proj.grad.shape == (COUNT, 2 * INNER, HIDDEN)
    assert not experts.gate_up_proj.grad[2].any() and experts.gate_up_proj.grad[3].any()


@pytest.mark.parametrize("name", ["nvfp4, dequantized", "nvfp4, four over six", "nvfp4"])
def test_tokens_of_other_ranks_take_part_in_nothing(device, name):
    """The others' results are those of a call without them, one product after another."""
    experts, _ = converted(device)
    x, index, weights = routed(device)
    x, index = elsewhere(x, index)
    recipe = dataclasses.replace(RECIPES[name], stochastic_rounding=False)
    with autocast(recipe):
        at_once = why_one_by_one(x, experts.gate_up_proj.shape[1:], recipe) is None
    if at_once:
        pytest.skip("all groups are multiplied at once, which the next test looks at")
    own = (index < COUNT).any(dim=1)
    found = step(experts, x, index, weights, recipe)
    expected = step(experts, x, index, weights, recipe, own)
    for i, (mine, other) in enumerate(zip(found[:3], expected[:3], strict=True)):
        assert_bytes_equal(mine[own], other, f"result {i}")
        assert not mine[~own].any() and not mine.isnan().any(), "of other ranks"
    assert_all_equal(found[3:], expected[3:], "gradient of experts")


@pytest.mark.usefixtures("multiplied_at_once")
@pytest.mark.parametrize("stochastic", [False, True])
def test_tokens_of_other_ranks_where_groups_are_multiplied_at_once(device, stochastic):
    """They are zeros there, whatever they were; sums without them may run in another order."""
    experts, _ = converted(device)
    x, index, weights = routed(device)
    recipe = NVFP4Recipe(stochastic_rounding=stochastic, backend="exact")
    given, index = elsewhere(x, index)
    own = (index < COUNT).any(dim=1)
    results = []
    for each in (given, x):
        torch.manual_seed(7)
        results.append(step(experts, each, index, weights, recipe))
    assert_all_equal(*results)
    found = results[0]
    assert not any(result[~own].any() for result in found[:3])
    if not stochastic:
        expected = step(experts, x, index, weights, recipe, own)
        found[:3] = [result[own] for result in found[:3]]
        for mine, other in zip(found, expected, strict=True):
            assert (mine - other).norm() <= 1e-2 * other.norm()


@pytest.mark.heavy
def test_compiled_models_leave_them_out_too(fresh_compiler, device):
    experts, _ = converted(device)
    x, index, weights = routed(device)
    x, index = elsewhere(x, index)
    run = torch.compile(experts, backend="aot_eager")
    with autocast(NVFP4Recipe()), torch.no_grad():
        assert_bytes_equal(run(x, index, weights), experts(x, index, weights), "y")


def test_near_the_plain_module(device):
    experts, _ = converted(device)
    x, index, weights = routed(device)
    expected = experts(x, index, weights)
    with autocast(RECIPES["nvfp4"]):
        y = experts(x, index, weights)
        none = torch.full_like(index, COUNT)
        assert not experts(x, none, weights).any(), "of no expert"
    assert 0 < (y - expected).norm() / expected.norm() < 0.2
    dequantized = Plain(device)
    dequantized.load_state_dict({name: p.dequantize() for name, p in experts.named_parameters()})
    assert_bytes_equal(expected.detach(), dequantized(x, index, weights).detach(), "outside of autocast")


def test_copies_and_classes():
    experts, _ = converted("cpu")
    assert isinstance(experts, Experts) and isinstance(experts, Plain)
    assert list(experts.state_dict()) == ["gate_up_proj", "down_proj"]
    x, index, weights = routed("cpu")
    with autocast(RECIPES["nvfp4"]):
        expected = experts(x, index, weights)
        for again in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            assert type(again) is type(experts) and again._products[0].weight is again.gate_up_proj
            assert_bytes_equal(again(x, index, weights).detach(), expected.detach(), "a copy")


def layers_of(experts, filter_fn=takes_experts):
    model = nn.ModuleDict({"experts": experts})
    report = zerofp4.convert_model(model, filter_fn, layers=True)
    assert isinstance(model["experts"], Experts) == bool(report.layers)
    return report.layers, len(report.converted)


def test_what_stays_as_it_is_and_what_does_not():
    assert layers_of(Plain(), lambda module, name: name.endswith("down_proj")) == ([], 1)
    assert layers_of(Transposed()) == layers_of(Normed()) == ([], 2)
    assert layers_of(Plain()) == layers_of(NotNormed()) == (["experts"], 2)


def test_a_recipe_that_names_the_experts():
    experts, _ = converted("cpu")
    model = nn.ModuleDict({"experts": experts})
    recipe = MXFP8Recipe(modules=[("experts", NVFP4Recipe())])
    x, index, weights = routed("cpu")
    with autocast(RECIPES["nvfp4"]):
        expected = experts(x, index, weights)
    with autocast(recipe, model):
        assert_bytes_equal(experts(x, index, weights).detach(), expected.detach(), "by its recipe")
    with autocast(MXFP8Recipe()), pytest.raises(ValueError, match="which MXFP8Recipe cannot multiply"):
        experts(x, index, weights)
