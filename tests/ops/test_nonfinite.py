"""find_nonfinite: the largest word of a tensor that holds a NaN or Inf, wherever in it."""

from __future__ import annotations

import math

import pytest
import torch

from zerofp4.ops import find_nonfinite

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
