"""A training loop of accelerate with NVFP4 weights, whose state is saved and loaded.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import tempfile

import accelerate
import torch
import torch.distributed as dist
from torch import nn

import zerofp4

world = zerofp4.launch.init_process_group()
accelerator = accelerate.Accelerator(cpu=world.device.type == "cpu")
told = [tempfile.mkdtemp()]
if world.world_size > 1:
    dist.broadcast_object_list(told)  # one folder for all ranks
folder = told[0]

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(world.device)
zerofp4.convert_model(net)
zerofp4.register_plain_state_dict(net)  # safetensors holds values, not quantized tensors
optimizer = zerofp4.optim.ZeroFP4Optimizer(net.named_parameters(), zerofp4.optim.FusedAdamW, lr=3e-3)
# accelerate saves the optimizer on rank 0 alone: gather its state there before.
accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())
inputs = torch.utils.data.DataLoader(list(torch.randn(256, 64)), batch_size=8)
model, prepared, loader = accelerator.prepare(net, optimizer, inputs)


def train():
    losses = []
    for batch in loader:
        loss = (model(batch) - batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.item())
    return losses


losses = train()
accelerator.save_state(folder)
saved = [master.clone() for master in optimizer.gathered_masters()]
losses += train()
accelerator.load_state(folder)  # in a world of any size
assert all(map(torch.equal, optimizer.gathered_masters(), saved))
print(f"rank {world.rank} of {world.world_size}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]
# DistributedDataParallel would keep the threads of gloo, in which torch may abort at exit.
model, prepared, loader = accelerator.free_memory(model, prepared, loader)
if world.rank == 0:
    print("Accelerate trained NVFP4 weights, and load_state() brought the saved masters back to the bit.")
zerofp4.launch.destroy_process_group()
