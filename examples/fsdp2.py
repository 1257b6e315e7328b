"""FSDP2 that gathers weights in 4 bits: FP32 parameters, torch's own optimizer.

    python examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerofp4
from zerofp4.integrations import fsdp2

world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
model = nn.Sequential(*blocks).to(world.device)  # float32, as fsdp2.prepare wants it
report = fsdp2.prepare(model)  # before fully_shard
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
fsdp2.attach(model, optimizer)  # after the optimizer exists: each step casts the shards

torch.manual_seed(1 + world.rank)  # each rank has batches of its own
losses = []
for _ in range(20):
    batch = torch.randn(16, 64, device=world.device)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"rank {world.rank} of {world.world_size}: {report}")
print(f"rank {world.rank}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]

# A layer multiplies what quantizing the whole FP32 weight on one machine gives.
layer = model[0][0]
master = layer.weight.full_tensor().detach()
model[0].unshard()
assert torch.equal(layer.weight, zerofp4.quantize(master.bfloat16()).dequantize())
model[0].reshard()
if world.rank == 0:
    print("The loss fell, and FSDP2 gathered the values of the whole master, quantized on one machine.")
zerofp4.launch.destroy_process_group()
