"""One CUDA graph of a whole training step: forward, backward, clipping, and the optimizer. Needs one GPU.

    python examples/cuda_graph_step.py

A second model makes the same steps without a graph, and the losses are compared bit for bit.
"""

import torch
from torch import nn

import zerofp4

if not torch.cuda.is_available():
    raise SystemExit("a CUDA graph needs a GPU, and torch finds none")
device = torch.device("cuda", torch.cuda.current_device())
WARM_UP, STEPS = 3, 20


def make_model():
    """The same weights in each call, an optimizer that can be captured, and a schedule."""
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    model = nn.Sequential(nn.Linear(256, 512, **options), nn.GELU(), nn.Linear(512, 256, **options))
    zerofp4.convert_model(model)
    # Every replay reads a tensor on the GPU. A float would stay as it is during the capture.
    lr = torch.tensor(3e-3, device=device)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(
        model.named_parameters(), zerofp4.optim.FusedAdamW, lr=lr, capturable=True
    )
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def train_step(model, optimizer, batch):
    optimizer.zero_grad()  # to None: the captured backward pass writes gradients to memory of the graph
    loss = (model(batch) - batch).float().square().mean()
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return loss.detach()


torch.manual_seed(1)
batches = torch.randn(STEPS, 128, 256, dtype=torch.bfloat16).pin_memory()
model, optimizer, schedule = make_model()
eager = []
for data in batches:
    eager.append(train_step(model, optimizer, data.to(device)).item())
    schedule.step()

model, optimizer, schedule = make_model()
batch = torch.empty(batches.shape[1:], dtype=batches.dtype, device=device)  # what every replay reads
replayed = []
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):  # ordinary steps, the first of which allocate and lay out everything
    for data in batches[:WARM_UP]:
        batch.copy_(data)
        replayed.append(train_step(model, optimizer, batch).item())
        schedule.step()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # records a step, and changes no weight
    loss = train_step(model, optimizer, batch)
for data in batches[WARM_UP:]:
    batch.copy_(data)
    graph.replay()
    replayed.append(loss.item())  # waits for the replay: log rarely
    schedule.step()  # writes to the tensor

print(f"loss {replayed[0]:.4f}, then {replayed[-1]:.4f}; without a graph {eager[-1]:.4f}")
assert replayed == eager and replayed[-1] < replayed[0] and optimizer.skipped_steps == 0
print("Replays of a captured step gave the losses of the same steps without a graph.")
