"""MultiTensor.widen: a list of tensors as float32."""

from __future__ import annotations

import math

import pytest
import torch
from cases.ops import DTYPES
from helpers import assert_values_equal, poisoned_allocations

from zerofp4.ops import MultiTensor, tensor_facts


@pytest.mark.cpu_kernel
def test_every_value_in_its_place(device):
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


def test_too_few_outputs_raise(device):
    tensors = [torch.ones(5, device=device), torch.ones(5, device=device)]
    launches = MultiTensor(tensors)
    launches.addresses = tensor_facts(tensors).addresses
    with pytest.raises(IndexError, match="fewer addresses than tensors"):
        launches.widen([torch.zeros(5, device=device)])
