"""What is asked of a list of tensors at once."""

from __future__ import annotations

import pytest
import torch
from helpers import at_an_odd_address, needs_gpu

import zerofp4
from zerofp4.ops import Versions, addresses_of, plain_facts, state_facts, tensor_facts


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


def test_versions_tell_of_writes_and_of_other_tensors(device):
    first, second = (torch.zeros(3, device=device) for _ in range(2))
    versions = Versions([first, None, second])
    assert versions.written() == [] and not versions.changed([first, None, second])
    assert versions.changed([first, second, second]) and versions.changed([first, None, second.clone()])
    second.add_(1)
    assert versions.written() == versions.written([1]) == [1] and versions.written([0]) == []
    assert versions.changed([first, None, second])
    first.add_(1)
    versions.take([1])
    assert versions.written() == [0]
    versions.take()
    assert not versions.written() and not versions.changed([first, None, second])
