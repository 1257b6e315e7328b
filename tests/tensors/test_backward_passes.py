"""Backward passes that are given quantized tensors: what they call computes as the forward pass did."""

import pytest
import torch
from helpers import assert_all_equal, assert_bytes_equal
from tensor_helpers import values
from torch import autograd, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerofp4


def weights(device, quantize=zerofp4.quantize):
    drawn = [values(64, 64, device=device, seed=i) / 8 for i in range(3)]
    return [nn.Parameter(quantize(x, columnwise=True)) for x in drawn]


def inputs(device):
    return values(32, 64, device=device, seed=3).requires_grad_()


def is_ours(product):
    return type(product.grad_fn).__name__ == "LinearBackward"


class Recomputes(autograd.Function):
    """F.linear(x, weight), once more in its backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            again = F.linear(*leaves)
        assert is_ours(again)
        return autograd.grad(again, leaves, grad)


LAYERS = {
    "checkpoint": lambda x, w: checkpoint(lambda x: F.linear(x, w), x, use_reentrant=False),
    "checkpoint of a weight": lambda x, w: checkpoint(F.linear, x, w, use_reentrant=False),
    "checkpoint of matmul": lambda x, w: checkpoint(lambda x: F.gelu(x) @ w, x, use_reentrant=False),
    "own function": Recomputes.apply,
    "functional_call": lambda x, w: checkpoint(
        torch.func.functional_call, nn.Linear(64, 64, False, "meta"), {"weight": w}, (x,), use_reentrant=False
    ),
}


def outputs(x, parameters, layer=LAYERS["checkpoint"]):
    for w in parameters:
        x = F.gelu(layer(x, w))
    return x


def loss_of(x, parameters, layer=LAYERS["checkpoint"]):
    return outputs(x, parameters, layer).float().square().mean()


def with_backward(loss, parameters):
    loss.backward()
    return gradients_left_in(parameters)


def gradients_left_in(parameters):
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def accumulated(function):
    def run(loss, parameters):
        function(loss, parameters)
        return gradients_left_in(parameters)

    return run


PASSES = {
    "grad of one": lambda loss, ws: [autograd.grad(loss, w, retain_graph=True)[0] for w in ws],
    "grad with a graph": lambda loss, ws: [g.detach() for g in autograd.grad(loss, ws, create_graph=True)],
    "grad, materialized": lambda loss, ws: autograd.grad(loss, ws, materialize_grads=True),
    "backward": accumulated(lambda loss, ws: loss.backward(inputs=ws)),
    "backward to one": accumulated(lambda loss, ws: [loss.backward(None, True, inputs=w) for w in ws]),
    "autograd.backward": accumulated(lambda loss, ws: autograd.backward(loss, inputs=ws)),
}


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_gradients_are_those_of_loss_backward(device, run, layer):
    parameters, x = weights(device), inputs(device)
    expected = with_backward(loss_of(x, parameters, layer), parameters)
    actual = run(loss_of(x, parameters, layer), parameters)
    assert_all_equal(actual, expected, "weight")


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("quantize", [zerofp4.quantize, zerofp4.quantize_mxfp8])
def test_hooks_compute_with_quantized_weights_as_outside(device, run, quantize):
    parameters, x = weights(device, quantize), inputs(device)
    seen = []

    def hook(gradient):
        with torch.enable_grad():
            seen.append(is_ours(F.linear(gradient, parameters[0])))

    h = F.linear(x, parameters[1])
    h.register_hook(hook)
    run(F.linear(h, parameters[2]).float().square().mean(), parameters[1:2])
    assert seen == [True]


def quantized_output(x, parameters):
    return zerofp4.quantize(outputs(x, parameters), straight_through=True)


@pytest.mark.parametrize(
    "run",
    [
        lambda y, grad, ws: autograd.grad(y, ws, grad),
        lambda y, grad, ws: y.backward(grad) or gradients_left_in(ws),
        lambda y, grad, ws: autograd.backward([y], [grad]) or gradients_left_in(ws),
        lambda y, grad, ws: y.backward(grad, inputs=ws) or gradients_left_in(ws),
    ],
    ids=["grad", "backward", "autograd.backward", "backward to weights"],
)
def test_from_a_quantized_output(device, run):
    parameters, x = weights(device), inputs(device)
    grad = values(32, 64, device=device, seed=4)
    outputs(x, parameters).backward(grad)
    expected = gradients_left_in(parameters)
    actual = run(quantized_output(x, parameters), grad, parameters)
    assert_all_equal(actual, expected, "weight")
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        autograd.grad(quantized_output(x, parameters), parameters)


def test_to_a_quantized_tensor_that_is_no_leaf(device):
    """Its gradient, and that of what it was quantized from, which autograd passes through."""
    master = values(64, 64, device=device, dtype=torch.float32).requires_grad_()
    x = inputs(device).detach().float()

    def graph():
        q = zerofp4.quantize(master, straight_through=True)
        return q, loss_of(x, [q])

    loss_of(x, [leaf := nn.Parameter(zerofp4.quantize(master.detach()))]).backward()
    q, loss = graph()
    for gradient in autograd.grad(loss, [q, master]):
        assert_bytes_equal(gradient, leaf.grad, "gradient")
    q, loss = graph()
    loss.backward(inputs=[q])
    assert_bytes_equal(q.grad, leaf.grad, "retained")
    assert master.grad is None


def test_unused_weights(device):
    used, unused = weights(device)[:2]
    loss = loss_of(inputs(device), [used])
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        autograd.grad(loss, [used, unused], retain_graph=True)
    gradient, nothing = autograd.grad(loss, [used, unused], allow_unused=True, retain_graph=True)
    assert nothing is None
    again, zeros = autograd.grad(loss, [used, unused], materialize_grads=True)
    assert_bytes_equal(again, gradient, "used")
    assert type(zeros) is torch.Tensor
    assert_bytes_equal(zeros, torch.zeros_like(gradient), "unused")


@pytest.mark.parametrize("run", PASSES.values(), ids=PASSES)
def test_a_frozen_weight_is_refused_as_torch_does(device, run):
    parameters, x = weights(device), inputs(device)
    loss = loss_of(x, parameters)
    frozen = parameters[1].detach()
    with pytest.raises(RuntimeError, match=r"does not require grad|has requires_grad=False"):
        run(loss, [parameters[0], frozen])
    with pytest.raises(RuntimeError, match="does not require grad"):
        autograd.grad(frozen, parameters, torch.ones_like(frozen))
    assert [w.grad for w in parameters[1:]] == [None, None]
    loss.backward()  # the graph is still there


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_regions(device, backend):
    torch._dynamo.reset()
    parameters, x = weights(device), inputs(device)
    expected = with_backward(loss_of(x, parameters), parameters)
    layer = torch.compile(F.linear, backend=backend, fullgraph=True)
    recomputed = loss_of(x, parameters, lambda x, w: checkpoint(layer, x, w, use_reentrant=False))
    inside = torch.compile(
        lambda x: autograd.grad(loss_of(x, parameters, F.linear), parameters), backend=backend
    )
    for found in (autograd.grad(recomputed, parameters), inside(x)):
        assert_all_equal(found, expected, "weight")
    torch._dynamo.reset()
