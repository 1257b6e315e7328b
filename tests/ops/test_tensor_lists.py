"""What is asked of a list of tensors at once."""

from __future__ import annotations

import pytest
import torch
from helpers import at_an_odd_address, needs_gpu

import zerofp4
from zerofp4.ops import (
    addresses_of,
    gradients_of,
    increment_versions,
    plain_facts,
    pointers,
    state_facts,
    tensor_facts,
    versions_of,
)
from zerofp4.ops.tensor_lists import first_moved, numbers


def some(device) -> list[torch.Tensor]:
    """One of every kind that plans ask about, and views at an offset."""
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)
    parameter = torch.nn.Parameter(torch.zeros(64, device=device))
    dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    views = [memory[256 * i : 256 * (i + 1)].view(dtype) for i, dtype in enumerate(dtypes, start=1)]
    return [parameter, memory[3:], memory.view(64, 64).t(), torch.empty(0, device=device), *views]


def test_pointers_are_those_of_torch(device):
    tensors = some(device)
    expected = [tensor.data_ptr() for tensor in tensors]
    assert numbers(pointers(tensors)) == addresses_of("tensors", tensors) == expected


@pytest.mark.parametrize("place", [0, 3, 8])
def test_the_first_that_moved_is_found(device, place):
    tensors = some(device)
    before = pointers(tensors)
    assert pointers(list(tensors)) == before
    moved = [*tensors[:place], *(torch.zeros(8, device=device) for _ in tensors[place:])]
    assert first_moved(before, pointers(moved)) == place


def test_facts_of_equal_tensors_are_equal(device):
    tensors = [*some(device), None]
    before = tensor_facts(tensors)
    tensors[1].fill_(7)
    assert tensor_facts([t if t is None else t.detach() for t in tensors]) == before


def test_facts_differ_where_anything_does(device):
    memory = torch.zeros(64, device=device)
    before = tensor_facts([memory])
    others = [
        memory[1:],
        memory[:63],
        memory.view(8, 8),
        memory.as_strided((64,), (0,)),
        memory.view(torch.int32),
        memory[:32].view(torch.complex64)[:0],
        memory[:0],
        memory.clone(),
        None,
    ]
    found = [tensor_facts([other]) for other in others]
    assert before not in found
    assert all(a != b for i, a in enumerate(found) for b in found[:i])
    assert tensor_facts([memory, None]) != tensor_facts([None, memory])
    assert tensor_facts([memory, memory]) != before


def test_freed_storage_has_another_address():
    tensor = torch.zeros(64)
    before, facts = pointers([tensor]), tensor_facts([tensor])
    tensor.untyped_storage().resize_(0)
    assert pointers([tensor]) != before and tensor_facts([tensor]) != facts


@needs_gpu
def test_facts_of_empty_tensors_tell_devices_apart():
    assert tensor_facts([torch.empty(0)]) != tensor_facts([torch.empty(0, device="cuda")])


def test_plain_facts_are_those_of_tensors_that_need_no_look(device):
    memory, other = (torch.ones(8, 8, device=device) for _ in range(2))
    freed = torch.ones(8, 8, device=device)
    freed.untyped_storage().resize_(0)

    def kinds(*tensors):
        return plain_facts(list(tensors)).kinds

    assert plain_facts([memory, None]) == tensor_facts([memory, None])
    assert kinds(memory, None) == kinds(other, None) != kinds(memory)
    assert kinds(memory) not in (kinds(memory.t()), kinds(at_an_odd_address(memory)))
    others = [freed, memory.to_sparse(), torch._neg_view(memory), torch._efficientzerotensor((8, 8))]
    others += [memory.to("meta"), zerofp4.quantize(torch.ones(16, 16, device=device))]
    assert not any(plain_facts([memory, other]) for other in others)
    assert kinds(memory) == kinds(torch.nn.Parameter(memory))


def test_facts_of_state_are_those_of_what_it_has(device):
    """Of each tensor under its own keys, in the order of the list, Nones where it has nothing."""
    tensors = [torch.ones(4, device=device) for _ in range(3)]
    state = {t: {"b": torch.ones(i + 1, device=device), "a": None} for i, t in enumerate(tensors)}
    keys = [("a", "b"), (), ("b",)]
    first, _, last = tensors
    expected = tensor_facts([*tensors, None, state[first]["b"], state[last]["b"]])
    assert state_facts(tensors, state, keys) == expected
    assert state_facts(tensors, dict(reversed(state.items())), keys) == expected
    state[last]["b"] = state[last]["b"].clone()
    assert state_facts(tensors, state, keys) not in (None, expected)
    for other in (zerofp4.quantize(torch.ones(16, 16, device=device)), 1.0):
        assert state_facts(tensors, state | {last: {"b": other}}, keys) is None
    assert state_facts(tensors, state, [("a", "b"), (), ("c",)]) is None
    expected = tensor_facts([*tensors, None, None, state[last]["b"]])
    for without in ({}, {first: {}}):
        state = {last: state[last], **without}
        assert state_facts(tensors, state, keys) == expected


def test_what_lies_in_a_freed_storage_has_no_address():
    tensors = [torch.zeros(64), torch.zeros(64)]
    tensors[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"^gradients\[1\] needs 256 bytes of its storage, which has 0"):
        addresses_of("gradients", tensors)


def parameters(device) -> list[torch.nn.Parameter]:
    """A plain one, a quantized one, and a plain one without a gradient."""
    weight = torch.nn.Parameter(zerofp4.quantize(torch.ones(16, 16, device=device)))
    found = [torch.nn.Parameter(torch.ones(3, device=device)), weight]
    for parameter in found:
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
    return [*found, torch.nn.Parameter(torch.ones(2, device=device))]


def test_gradients_are_the_objects_of_torch(device):
    given = parameters(device)
    found = gradients_of(given)
    assert all(a is p.grad for a, p in zip(found, given, strict=True)) and found[2] is None
    assert gradients_of([]) == []


def test_versions_count_writes(device):
    given = parameters(device)
    before = versions_of(given)
    assert before == [p._version for p in given]
    increment_versions(given[:2])
    assert versions_of(given) == [before[0] + 1, before[1] + 1, before[2]]
    assert [p._version for p in given] == versions_of(given)


def test_a_backward_pass_through_counted_values_fails(device):
    weight = torch.ones(3, device=device, requires_grad=True)
    y = (weight * weight).sum()
    increment_versions([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
