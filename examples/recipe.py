"""Layers that multiply in NVFP4 in both passes. One is left out, and a step has two micro-batches.

    python examples/recipe.py
    torchrun --nproc-per-node 2 examples/recipe.py
"""

import contextlib

import torch
from torch import nn

import zerofp4

world = zerofp4.launch.init_process_group()
torch.manual_seed(0)
options = {"device": world.device, "dtype": torch.bfloat16}
layers = {
    "up": nn.Linear(64, 128, **options),
    "gelu": nn.GELU(),
    "down": nn.Linear(128, 64, **options),
    "last": nn.Linear(64, 64, **options),
}
model = nn.Sequential()
for name, layer in layers.items():
    model.add_module(name, layer)
report = zerofp4.convert_model(model, layers=True)  # nn.Linear becomes zerofp4.nn.Linear
optimizer = zerofp4.optim.ZeroFP4Optimizer(model.named_parameters(), zerofp4.optim.FusedAdamW, lr=3e-3)
recipe = zerofp4.nn.NVFP4Recipe(modules=[("last", None)])  # `last` multiplies as outside of autocast

torch.manual_seed(1 + world.rank)  # each rank has batches of its own
losses = []
for _ in range(20):
    for micro_batch in range(2):
        batch = torch.randn(16, 64, device=world.device, dtype=torch.bfloat16)
        # Gradients travel with the last micro-batch only.
        with optimizer.no_sync() if micro_batch == 0 else contextlib.nullcontext():
            with zerofp4.nn.autocast(recipe, model):
                loss = (model(batch) - batch).float().square().mean() / 2
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(2 * loss.item())
print(f"rank {world.rank} of {world.world_size}: layers {report.layers}")
print(f"rank {world.rank}: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert report.layers == ["up", "down", "last"] and losses[-1] < losses[0]

# Inside of autocast the operands are quantized: the output differs from that of the same layer outside.
plain = model.up(batch)
with zerofp4.nn.autocast(recipe, model):
    quantized, left_out = model.up(batch), model.last(batch)
assert not torch.equal(quantized, plain) and torch.equal(left_out, model.last(batch))
if world.rank == 0:
    print("Products inside autocast took quantized operands, those outside did not, and the loss fell.")
zerofp4.launch.destroy_process_group()
