"""Muon for the matrices and AdamW for the rest, in one optimizer. Each matrix lies whole with one rank.

    python examples/muon.py
    torchrun --nproc-per-node 2 examples/muon.py
"""

import torch
from torch import nn

import zerofp4

world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(world.device)
zerofp4.convert_model(model)
matrices = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
others = [(name, p) for name, p in model.named_parameters() if p.dim() != 2]
groups = [
    {"params": matrices},
    {"params": others, "optimizer_class": zerofp4.optim.FusedAdamW, "lr": 3e-3, "weight_decay": 0.0},
]
optimizer = zerofp4.optim.ZeroFP4Optimizer(groups, torch.optim.Muon, lr=0.02, weight_decay=0.1)

torch.manual_seed(1 + world.rank)  # each rank has batches of its own
losses = []
for _ in range(20):
    batch = torch.randn(16, 64, device=world.device)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"rank {world.rank} of {world.world_size}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]

# The master, gradient and momentum of a matrix lie whole with one rank; those of the rest are cut anywhere.
buckets = [(b["optimizer"], b["whole_matrices"]) for b in optimizer.describe()["buckets"]]
assert buckets == [("Muon", True), ("FusedAdamW", False)]
if world.rank == 0:
    print("Muon updated whole matrices, FusedAdamW everything else, and the loss fell.")
zerofp4.launch.destroy_process_group()
