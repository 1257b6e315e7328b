"""torch's own sharded optimizer over the weights of a step: what it takes beside ours."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from benchmarking.bf16 import ARGUMENTS
from benchmarking.timer import Timer
from benchmarking.traffic import elements_of
from zerofp4.distributed import attempt, exchange

NAME = "zero_redundancy"


def measure_zero_redundancy(timer: Timer, shapes: list[tuple[int, int]], ours: Mapping[str, float]) -> None:
    """ZeroRedundancyOptimizer of torch.optim.AdamW(fused=True) over bf16 parameters: moments are bf16 too,
    and there are no masters, so that it moves the fewest bytes and is less exact than the others. It takes
    gradients that are averaged on every rank, as DDP leaves them: here by one all-reduce of a flat buffer.

    Where it cannot run, that is said, and its rows are left out. ours: milliseconds of steps, by row.
    """
    numel, ranks = elements_of(shapes), timer.world.world_size
    if not timer.has_room(f"step_{NAME}", (4 + 4 / ranks) * numel):
        return
    built, error = attempt(_build, timer.device, shapes)
    try:
        exchange(None, error, dist.group.WORLD, "building torch's ZeroRedundancyOptimizer")
    except Exception as failure:
        timer.session.say(f"step_{NAME} is left out: {failure}")
        return
    gradients, optimizer = built
    average = dist.ReduceOp.AVG if timer.device.type == "cuda" else dist.ReduceOp.SUM

    def reduce() -> None:
        dist.all_reduce(gradients, average)

    def whole() -> None:
        reduce()
        optimizer.step()

    with torch.no_grad(), timer.peak(f"memory_{NAME}", "parameters, gradients and state included"):
        rule = "bf16 without masters: an all-reduce of gradients, torch's ZeroRedundancyOptimizer.step()"
        found = timer.ms(f"step_{NAME}", whole, rule)
        timer.ms(f"reduce_{NAME}", reduce, "the all-reduce alone, which leaves gradients as DDP does")
        rule = "step() alone: torch's fused AdamW of a rank's own parameters, broadcasts of all"
        timer.ms(f"update_{NAME}", optimizer.step, rule)
    for name, ms in ours.items():
        rule = f"{name} of ours over that of torch's ZeroRedundancyOptimizer with its all-reduce"
        timer.session.count(f"{name}_over_{NAME}/{timer.places}", "ratio", ms / found, rule)


def _build(device: torch.device, shapes: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """The gradients in one flat buffer, and the optimizer of parameters that have them, after a first step,
    which makes its state.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # two seconds, of every subcommand elsewhere

    options = {"device": device, "dtype": torch.bfloat16}
    parameters = [nn.Parameter(torch.zeros(shape, **options)) for shape in shapes]
    # One broadcast for each rank's parameters, which lie in one piece then.
    optimizer = ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ARGUMENTS
    )
    gradients = torch.randn(elements_of(shapes), **options).mul_(1e-2)
    pieces = gradients.split([rows * cols for rows, cols in shapes])
    for parameter, piece, shape in zip(parameters, pieces, shapes, strict=True):
        parameter.grad = piece.view(shape)
    optimizer.step()
    return gradients, optimizer
