"""Gradients that other ranks read where they are: what a step that comes to nothing leaves behind."""

from __future__ import annotations

import torch
from torch import nn

import zerofp4
from zerofp4.engine.peer_reducer import PeerReducer
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


class Alone:
    """Stands for the memory of ranks that share it."""

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def rows_like(self, _):
        return None

    def arrive(self):
        pass


def test_a_step_that_is_not_taken_keeps_no_gradients():
    """What somebody keeps is not written over: the next backward pass would make all gradients elsewhere."""
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)))
    zerofp4.convert_model(model)
    optimizer = ZeroFP4Optimizer(model.named_parameters(), FusedAdamW, lr=0.01)
    reducer = PeerReducer(optimizer._shards.buffers, None, optimizer._reducer._wire, Alone())
    places = {view.data_ptr() for source in reducer._sources for view in source._views}
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    for is_taken in (False, True, False):
        model(x).float().square().mean().backward()
        gradients = [p.grad for p in optimizer._shards.parameters]
        assert {gradient.data_ptr() for gradient in gradients} <= places
        reducer.prepare(gradients)
        if is_taken:
            reducer.begin(gradients, prepared=True)
        del gradients
        for p in model.parameters():
            p.grad = None
