"""GroupedLinear under torch.compile where all groups are multiplied at once: one graph, and the bytes of the
layer without it. On the CPU the code of Hopper runs when it is made to.
"""

import pytest
import torch
from helpers import assert_bytes_equal
from tensor_helpers import values

from zerofp4.nn import GroupedLinear, NVFP4Recipe, autocast

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("multiplied_at_once")]

SPLITS = [16, 0, 17, 3]
ZEROFP4 = torch.ops.zerofp4


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(device, **options):
    torch.manual_seed(0)
    return GroupedLinear(4, 64, 48, device=device, dtype=torch.bfloat16, **options)


def step(module, function, recipe, splits, first=None, seed=0):
    module.zero_grad()
    x = values(36, 64, device=device_of(module), seed=seed).requires_grad_()
    with autocast(recipe):
        y = function(x, splits, first)
    torch.manual_seed(7)
    y.backward(values(36, 48, device=y.device, seed=1))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def device_of(module):
    return next(module.parameters()).device


def assert_same(actual, expected):
    for i, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bytes_equal(mine, other, f"result {i}")


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"primary_weights": True}], ids=str)
def test_one_graph_and_the_same_bytes(device, options):
    """Splits that change are no other graph."""
    module, recipe = made(device, **options), NVFP4Recipe()
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    for splits in (SPLITS, [9, 9, 9, 9]):
        given = torch.tensor(splits, device=device)
        with torch.compiler.set_stance("default" if splits is SPLITS else "fail_on_recompile"):
            actual = step(module, run, recipe, given)
        assert_same(actual, step(module, module, recipe, given))


def test_splits_on_the_host_and_one_layer_that_needs_no_gradient(device):
    module, recipe = made(device, bias=False), NVFP4Recipe(hadamard=False)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same(step(module, run, recipe, SPLITS), step(module, module, recipe, SPLITS))
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert_same(step(module, run, recipe, SPLITS), step(module, module, recipe, SPLITS))


@pytest.mark.parametrize("options", [{}, {"primary_weights": True}], ids=str)
def test_the_cache_is_that_of_the_layer(device, options):
    module, recipe = made(device, **options), NVFP4Recipe(stochastic_rounding=False)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    for first in (True, False):
        assert_same(step(module, run, recipe, SPLITS, first), step(module, module, recipe, SPLITS))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(values(*parameter.shape, device=device, seed=4))
    assert_same(step(module, run, recipe, SPLITS, False), step(module, module, recipe, SPLITS))


def test_weights_in_rows_of_16_are_quantized_one_by_one(device):
    module = made(device)
    recipe = NVFP4Recipe(weight_block=(1, 16), stochastic_rounding=False)
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same(step(module, run, recipe, SPLITS), step(module, module, recipe, SPLITS))


def test_main_grad_is_outside_of_the_graph(device):
    module, recipe = made(device, fuse_wgrad_accumulation=True), NVFP4Recipe()
    results = []
    for run in (torch.compile(module, backend="aot_eager"), module):
        module.weight.main_grad = torch.zeros(4, 48, 64, device=device)
        results.append([*step(module, run, recipe, SPLITS), module.weight.main_grad])
    assert_same(*results)


def test_opcheck(device):
    module, recipe = made(device), NVFP4Recipe(stochastic_rounding=False)
    x, splits = values(36, 64, device=device), torch.tensor(SPLITS, device=device)
    with autocast(recipe):
        common = ([], torch.bfloat16, 448, recipe.key, None)
        arguments = (x, [], splits, module.bias, module.weight, *common, None, True, True)
        utils = ("test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ZEROFP4.linear.default, arguments, test_utils=utils)
        _, offsets, error, *kept = (each.detach() for each in ZEROFP4.linear(*arguments))
        grad, groups = values(36, 48, device=device, seed=1), [splits, offsets, error]
        for out, adds in ((None, False), (torch.zeros(4, 48, 64, device=device), True)):
            arguments = (grad, groups, kept[:3], 64, kept[3:], None, *common, out, adds, x.dtype, True, True)
            torch.library.opcheck(ZEROFP4.linear_gradients.default, arguments, test_utils=utils[1:])
