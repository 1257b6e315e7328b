"""Flat memory for gradients of all parameters."""

from __future__ import annotations

import torch

from zerofp4.engine import Bucket, GradientMemory, Trained


def memory_of(parameters, dtype=torch.bfloat16):
    buffer = Bucket(range(len(parameters)), [Trained(p, "") for p in parameters])
    shape = buffer.world_size, buffer.slice_numel
    return GradientMemory(buffer, torch.zeros(shape, dtype=dtype, device=buffer.device), set())
