"""A mixture of experts whose weights are one NVFP4 parameter [experts, out, in].

    python examples/experts.py
    torchrun --nproc-per-node 2 examples/experts.py
"""

import torch
from torch import nn

import zerofp4


class Experts(nn.Module):
    """Each token goes to the expert that the router prefers."""

    def __init__(self, count, size, hidden):
        super().__init__()
        self.count, self.router = count, nn.Linear(size, count)
        self.up = zerofp4.nn.GroupedLinear(count, size, hidden)
        self.down = zerofp4.nn.GroupedLinear(count, hidden, size)

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()  # the tokens of an expert are neighbours
        splits = expert.bincount(minlength=self.count).tolist()
        y = self.down(nn.functional.gelu(self.up(x[order], splits)), splits)
        return weight[:, None] * torch.empty_like(y).index_copy(0, order, y)


world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
model = Experts(4, 32, 64).to(world.device)
report = zerofp4.convert_model(model)
optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=1e-2)
torch.manual_seed(1 + world.rank)  # each rank has batches of its own
losses = []
for _ in range(20):
    batch = torch.randn(64, 32, device=world.device)
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"rank {world.rank} of {world.world_size}: {report}")
print(f"rank {world.rank}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]

# Each expert is quantized alone, with an amax of its own, and weight[e] is one of them.
weight = model.up.weight
masters = dict(zerofp4.master_state_dict(model, optimizer))["up.weight"]
for e in range(4):
    assert torch.equal(weight[e].rowwise_data, zerofp4.quantize(masters[e]).rowwise_data)
assert weight.shape == (4, 64, 32) and weight.amax.shape == (4,)
if world.rank == 0:
    print("The loss fell, and the codes of each expert are those of its own master, quantized alone.")
zerofp4.launch.destroy_process_group()
