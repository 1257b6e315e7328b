"""An exponential moving average of the FP32 masters, evaluated in a plain model and exported.

    python examples/ema.py
    torchrun --nproc-per-node 2 examples/ema.py
"""

import torch
from torch import nn

import zerofp4

DECAY = 0.9


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(world.device)


world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
model = make_model()
zerofp4.convert_model(model)
optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=3e-3)
averages = zerofp4.optim.AveragedMasters(optimizer, decay=DECAY)  # each rank averages its own slice

torch.manual_seed(1 + world.rank)  # each rank has batches of its own
expected = optimizer.gathered_masters()[0]  # the first weight, whole: for the check below
losses = []
for _ in range(20):
    batch = torch.randn(16, 64, device=world.device)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    averages.update()
    optimizer.zero_grad()
    losses.append(loss.item())
    expected = DECAY * expected + (1 - DECAY) * optimizer.gathered_masters()[0]

# The averages are FP32 and were never quantized. save_safetensors(model, folder, averages) exports them.
averaged = make_model()
averaged.load_state_dict(dict(zerofp4.master_state_dict(model, averages)))
assert torch.equal(averaged[0].weight, expected)
loss = (averaged(batch) - batch).square().mean().item()
print(f"rank {world.rank} of {world.world_size}: loss {losses[0]:.3f}, of the average {loss:.3f}")
assert loss < losses[0]
if world.rank == 0:
    print("The averages of the FP32 masters are exact, and a plain model evaluated them.")
zerofp4.launch.destroy_process_group()
