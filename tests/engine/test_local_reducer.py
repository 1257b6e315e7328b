"""Gradients of a world of one: an update reads them where they are."""

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4.engine import LocalReducer, Sharding, build_buffers, make_wire

ORDERS = {
    "as they are": lambda g: g,
    "column by column": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:1].expand_as(g),
    "negated when read": torch._neg_view,
}


def reducer_of(parameters, **wire):
    wire = make_wire(wire.get("gradient_wire"), None, parameters)
    shardings = [Sharding(None)] * len(parameters)
    buffers = build_buffers(parameters, list(range(len(parameters))), shardings, wire)
    for buffer in buffers:
        buffer.allocate()
    return LocalReducer(buffers, None, wire)


def parameters_on(device):
    """Of two buckets."""
    shapes = (16, 40), (8, 3), (5, 7)
    dtypes = torch.bfloat16, torch.bfloat16, torch.float32
    return [torch.randn(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize("order", ORDERS)
def test_an_update_gets_gradients_in_order(device, order):
    parameters = parameters_on(device)
    reducer = reducer_of(parameters)
    gradients = [ORDERS[order](torch.randn_like(p)) for p in parameters]
    gradients[1] = None
    reducer.begin(reducer.prepare(gradients), prepared=True)
    found = {}
    for b in range(len(reducer.buffers)):
        assert reducer.can_bring(b)
        received, own, _ = reducer.bring(b)
        assert received is None
        found |= own
    assert found.keys() == {0, 2}
    for i, gradient in found.items():
        assert gradient.is_contiguous() and not gradient.is_neg()
        assert_bytes_equal(gradient, gradients[i].resolve_neg().contiguous(), f"gradient {i}")
        assert (gradient is gradients[i]) == (order == "as they are")
    assert not any(buffer.has_gradients for buffer in reducer.buffers), "nobody has asked for means"


def test_means_are_copied_when_they_are_asked_for(device):
    parameters = parameters_on(device)
    reducer = reducer_of(parameters)
    for _ in range(2):
        gradients = [torch.randn_like(p) for p in parameters]
        gradients[1] = None
        assert reducer.reduce(gradients) is None
        for buffer in reducer.buffers:
            for i, view in zip(buffer.indices, buffer.own_views(buffer.gradients), strict=True):
                expected = torch.zeros_like(parameters[i]) if gradients[i] is None else gradients[i]
                assert_bytes_equal(view, expected.float().view(-1), f"gradient {i}")


def test_norms_are_taken_of_gradients_where_they_are(device):
    parameters = parameters_on(device)
    gradients = [torch.randn_like(p) for p in parameters]
    gradients[1] = gradients[1].t().contiguous().t()
    gradients[2] = gradients[2].double()
    one, turned, double = reducer_of(parameters).means(gradients)
    assert one.data_ptr() == gradients[0].data_ptr() and one.dtype == torch.bfloat16
    assert turned.is_contiguous() and turned.equal(gradients[1].reshape(-1))
    assert double.dtype == torch.float32
    assert len(list(reducer_of(parameters).means([None, gradients[1], None]))) == 1


def test_what_is_rounded_to_another_dtype_is_reduced_first(device):
    """All values of bfloat16 are ones of float32, but a copy of every gradient would be one of the model."""
    parameters = parameters_on(device)
    reducer = reducer_of(parameters, gradient_wire=torch.float32)
    kinds = [buffer.kind for buffer in reducer.buffers]
    assert [reducer.can_bring(b) for b in range(len(kinds))] == [kind == "float32" for kind in kinds]
    gradients = [torch.randn_like(p) for p in parameters]
    prepared = reducer.prepare(gradients)
    assert all(mine is theirs for mine, theirs in zip(prepared, gradients, strict=True))
