"""Launches over lists of tensors: the largest word of one that holds a NaN or Inf, and float32 copies."""

from __future__ import annotations

import math

import pytest
import torch
from cases.ops import DTYPES
from helpers import assert_values_equal, poisoned_allocations

from zerofp4.ops import SQUARES, MultiTensor, add_squares, find_nonfinite, tensor_facts


def found_in(tensors, words, before=0):
    found = torch.full((), before, dtype=torch.int32, device=tensors[0].device)
    find_nonfinite(tensors, words, found)
    return found.item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_place_is_looked_at(device, dtype, value):
    """Whole blocks of vectors, what is left of them, and tensors at any address."""
    most = torch.finfo(dtype).max
    whole = torch.full((40_003,), most, dtype=dtype, device=device)
    whole[::2] = -most
    for begin in (0, 1):
        tensor = whole[begin:]
        assert found_in([tensor], [7]) == 0
        for place in (0, 1, 8191, 8192, 16_383, 16_384, 32_768, tensor.numel() - 1):
            kept = tensor[place].clone()
            tensor[place] = value
            assert found_in([tensor], [7]) == 7, (begin, place)
            tensor[place] = kept
        assert found_in([tensor], [7]) == 0


def test_the_largest_word_of_many_tensors(device):
    """More than travel in one launch, of several dtypes and lengths, some empty."""
    sizes = [0, 1, 5, 300, 0, 20_000]
    tensors = [torch.ones(sizes[i % 6], dtype=DTYPES[i % 3], device=device) for i in range(420)]
    words = list(range(420, 0, -1))
    assert found_in(tensors, words) == 0
    for i in (419, 251, 131, 127, 3):
        tensors[i].view(-1)[-1] = math.nan
        assert found_in(tensors, words) == words[i]
    assert found_in(tensors, words, before=1000) == 1000


def test_launches_over_tensors_that_move(device):
    """Kinds stay, addresses come from the last look; squares and words are those of the tensors there are."""
    tensors = [torch.ones(5, dtype=DTYPES[i % 3], device=device) for i in range(300)]
    tensors[1] = tensors[299] = None
    words = list(range(300, 0, -1))
    launches = MultiTensor(tensors, words)
    for bad in (0, 2, 150, 298):
        tensors = [tensor if tensor is None else tensor.clone() for tensor in tensors]
        tensors[bad][3] = math.inf
        launches.addresses = tensor_facts(tensors).addresses
        found = torch.zeros((), dtype=torch.int32, device=device)
        launches.find_nonfinite(found)
        assert found.item() == words[bad]
        squares, expected = (torch.zeros(SQUARES, dtype=torch.int64, device=device) for _ in range(2))
        launches.add_squares(squares)
        add_squares([tensor for tensor in tensors if tensor is not None], expected)
        assert squares.sum(0).equal(expected.sum(0))
        tensors[bad][3] = 1.0
        launches.find_nonfinite(found.zero_())
        assert found.item() == 0


def test_too_few_addresses_raise(device):
    tensors = [torch.ones(5, device=device), torch.ones(5, device=device)]
    launches = MultiTensor(tensors, [1, 1])
    with pytest.raises(IndexError, match="fewer addresses than tensors"):
        launches.find_nonfinite(torch.zeros((), dtype=torch.int32, device=device))
    launches.addresses = tensor_facts(tensors).addresses
    with pytest.raises(IndexError, match="fewer addresses than tensors"):
        launches.widen([torch.zeros(5, device=device)])


@pytest.mark.cpu_kernel
def test_float32_copies(device):
    """More tensors than travel in one launch, of several dtypes and lengths, at any address, some missing."""
    sizes = [0, 1, 7, 300, 4096, 8192, 40_003]
    tensors = []
    for i in range(290):
        values = torch.randn(sizes[i % 7] + i % 2, device=device).to(DTYPES[i % 3])
        values[3::5] = (math.inf, math.nan)[i % 2]
        tensors.append(values[i % 2 :])
    with poisoned_allocations():
        outputs = [torch.empty(t.numel() + i % 4, device=device)[i % 4 :] for i, t in enumerate(tensors)]
    missing = outputs[5].clone()
    tensors[5] = None
    launches = MultiTensor(tensors)
    launches.addresses = tensor_facts(tensors).addresses
    launches.widen(outputs)
    for i, (tensor, output) in enumerate(zip(tensors, outputs, strict=True)):
        expected = missing if tensor is None else tensor.float()
        assert_values_equal(output, expected, f"tensor {i}")
