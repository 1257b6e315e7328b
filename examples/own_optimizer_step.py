"""One NVFP4 weight whose FP32 master is sharded, updated by an optimizer step of your own.

    python examples/own_optimizer_step.py
    torchrun --nproc-per-node 3 examples/own_optimizer_step.py
"""

import torch

import zerofp4

world = zerofp4.launch.init_process_group()
device = world.device

# A weight that every rank holds whole, and the piece of its master that this rank owns: any piece will do.
weight = zerofp4.empty((256, 512), dtype=torch.bfloat16, device=device)
bounds = [rank * weight.numel() // world.world_size | (rank > 0) for rank in range(world.world_size)]
start, end = [*bounds, weight.numel()][world.rank : world.rank + 2]
torch.manual_seed(0)
whole = torch.randn(weight.shape).to(device)
master = whole.flatten()[start:end].clone()
optimizer = torch.optim.SGD([master], lr=0.1)

for _ in range(3):
    master.grad = master.sin()  # stands for your reduced gradient of this piece
    optimizer.step()
    zerofp4.cast_master_weights_to_nvfp4([weight], [master], [start])
    zerofp4.all_gather_nvfp4([weight], [start], [end - start])
    zerofp4.post_all_gather_processing([weight])

# What one process that had the whole master would hold.
for _ in range(3):
    whole -= 0.1 * whole.sin()
expected = zerofp4.quantize(whole.bfloat16(), columnwise=True)
assert torch.equal(weight.rowwise_data, expected.rowwise_data)
assert torch.equal(weight.columnwise_data, expected.columnwise_data)
print(f"rank {world.rank} of {world.world_size}: {weight}")
y = torch.nn.functional.linear(torch.randn(4, 512, device=device, dtype=torch.bfloat16), weight)
print(f"rank {world.rank}: linear gives {tuple(y.shape)} {y.dtype}")
if world.rank == 0:
    print("Every rank has the bytes of the whole weight, quantized on one machine.")
zerofp4.launch.destroy_process_group()
