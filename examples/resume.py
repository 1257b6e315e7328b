"""Trains ten steps and saves. Run again, it goes on from there, on any number of ranks.

    torchrun --nproc-per-node 2 examples/resume.py FOLDER
    python examples/resume.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zerofp4

if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit("usage: resume.py FOLDER")
folder = Path(sys.argv[1])
world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(world.device)
zerofp4.convert_model(model)
# A checkpoint is by name: named_parameters().
optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=3e-3)
test = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).to(world.device)


def loss_of(batch):
    return (model(batch) - batch).square().mean()


state = {"model": model, "optimizer": optimizer, "step": 0, "loss": loss_of(test).item()}
saved = sorted(folder.glob("step-*"))
if saved:
    dcp.load(state, checkpoint_id=saved[-1])
    assert loss_of(test).item() == state["loss"]  # the same bytes in every world
    print(f"rank {world.rank} of {world.world_size}: goes on from {saved[-1]}")

before = state["loss"]
torch.manual_seed(1000 * state["step"] + world.rank)  # each rank has batches of its own
for _ in range(10):
    loss_of(torch.randn(16, 64, device=world.device)).backward()
    optimizer.step()
    optimizer.zero_grad()
state["step"] += 10
state["loss"] = loss_of(test).item()
# A new folder for each save: a save that is killed leaves the older ones whole.
dcp.save(state, checkpoint_id=folder / f"step-{state['step']:04d}")
print(f"rank {world.rank} of {world.world_size}: loss {before:.3f}, then {state['loss']:.3f}")
assert state["loss"] < before
if world.rank == 0:
    print(f"The loss fell; step {state['step']} is saved. Another run, on any number of ranks, goes on.")
zerofp4.launch.destroy_process_group()
