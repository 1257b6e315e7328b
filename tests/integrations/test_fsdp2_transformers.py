"""Models of transformers that fully_shard cuts, made from small configs."""

from __future__ import annotations

import pytest
import torch
from cases.fsdp2 import check_gathered
from cases.serving import make_plain
from torch.distributed.fsdp import fully_shard

from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_models_of_transformers_train(mesh, name):
    torch.manual_seed(0)
    model = make_plain(name).float().train()
    report = fsdp2.prepare(model, lambda module, name: "lm_head" not in name and "gate.weight" not in name)
    assert report.share > 0.5
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    fsdp2.attach(model, optimizer)
    tokens = torch.randint(64, (2, 16))
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    check_gathered(model, names=[weight.name for *_, weight in fsdp2.prepared_weights(model)])
