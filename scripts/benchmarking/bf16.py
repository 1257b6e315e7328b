"""The plainest bf16 ZeRO-1: what ours is compared with."""

import torch
import torch.distributed as dist
from torch import nn

from benchmarking.timer import Timer
from benchmarking.traffic import elements_of
from zerofp4.layout import ceil_div

ARGUMENTS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""What AdamW is given, in all steps that are compared."""
MAX_NORM = 1.0


def measure_bf16(timer: Timer, shapes: list[tuple[int, int]]) -> dict[str, float] | None:
    """One reduce-scatter, one fused AdamW, one all-gather, of which a world of one has AdamW alone.
    Milliseconds by part; None where there is no room for it.
    """
    world, device = timer.world, timer.device
    several = world.world_size > 1
    part = ceil_div(elements_of(shapes), 256 * world.world_size) * 256
    if not timer.has_room("step_bf16", (4 * world.world_size + 16 + 2 * several) * part):
        return None
    options = {"device": device, "dtype": torch.bfloat16}
    weights = torch.zeros(world.world_size * part, **options)
    gradients = torch.randn(world.world_size * part, **options).mul_(1e-2)
    reduced = torch.empty(part, **options) if several else gradients
    own = weights[world.rank * part : (world.rank + 1) * part]
    master = nn.Parameter(torch.zeros(part, device=device))
    master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW([master], fused=True, **ARGUMENTS)
    average = dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce() -> None:
        if several:
            scatter(reduced, gradients, average)
        master.grad.copy_(reduced)

    def clip() -> None:
        total = torch.linalg.vector_norm(master.grad).square()
        dist.all_reduce(total)
        master.grad.mul_((MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))

    def publish() -> None:
        own.copy_(master)
        if several:
            gather(weights, own)

    def update() -> None:
        optimizer.step()
        publish()

    def whole() -> None:
        reduce()
        update()

    def clipped() -> None:
        reduce()
        clip()
        update()

    found = {}
    scattered, cast = ("reduce-scatter, ", "cast, all-gather") if several else ("", "cast")
    with torch.no_grad(), timer.peak("memory_bf16", "weights, gradients and state included"):
        found["step"] = timer.ms("step_bf16", whole, "those of reduce and of update, in bf16")
        found["step_clipped"] = timer.ms("step_bf16_clipped", clipped, "the same with clipping")
        found["reduce"] = timer.ms("reduce_bf16", reduce, f"{scattered}the slice to FP32")
        found["update"] = timer.ms("update_bf16", update, f"torch's fused AdamW, {cast}")
        found["publish"] = timer.ms("publish_bf16", publish, cast)
    return found
