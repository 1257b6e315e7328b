"""How much of a reduction of gradients is left to wait for behind a backward pass of matrix products."""

import torch
from torch import nn

import zerofp4
from benchmarking.timer import Timer
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

LONGER = 2.0
"""The backward pass takes so many times as long as the reduction alone."""
MOST_EXPOSED = 0.10
UNTIL = {
    "collective": "gradients are averaged",
    "peer": "those of all ranks are here, which AdamW adds up as it reads them",
}
"""By transport, what a step waits for before it updates."""
SIDES = {"cuda": 4096, "cpu": 64}


class Layer(torch.autograd.Function):
    """Adds nothing; its backward pass multiplies matrices, and has a gradient for the weight."""

    @staticmethod
    def forward(ctx, x, weight, gradient, matrix, products):
        ctx.work = gradient, matrix, products
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        gradient, matrix, products = ctx.work
        for _ in range(products):
            torch.mm(matrix, matrix)
        return grad, gradient, None, None, None


def measure_hiding(
    timer: Timer,
    shapes: list[tuple[int, int]],
    bucket_mb: float | None,
    transport: str,
    prefix: str,
    reduction: float,
) -> None:
    """prefix: of the names of rows. reduction: milliseconds of one that nothing hides."""
    options = {"device": timer.device, "dtype": torch.bfloat16}
    parameters = [
        nn.Parameter(zerofp4.quantize(torch.randn(shape, **options), columnwise=True)) for shape in shapes
    ]
    optimizer = ZeroFP4Optimizer(
        parameters, FusedAdamW, overlap="backward", transport=transport, bucket_mb=bucket_mb
    )
    gradients = {shape: torch.randn(shape, **options).mul_(1e-2) for shape in set(shapes)}
    side = SIDES[timer.device.type]
    matrix = torch.randn(side, side, **options)
    once = timer.ms(f"{prefix}product", lambda: torch.mm(matrix, matrix), f"of [{side}, {side}] in bfloat16")
    products = max(1, round(LONGER * reduction / once / len(shapes)))

    def backward() -> None:
        x = torch.zeros(1, device=timer.device, requires_grad=True)
        for parameter, shape in zip(parameters, shapes, strict=True):
            x = Layer.apply(x, parameter, gradients[shape], matrix, products)
        x.sum().backward()

    def alone() -> None:
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward()

    def with_reduction() -> None:
        optimizer.zero_grad()
        backward()
        with torch.no_grad():
            optimizer._rounds.close()
            optimizer._rounds.settle(again=False)
            if transport == "peer":
                optimizer._reducer.begin([])
            else:
                optimizer._reducer.reduce([])

    rule = f"{products} products of [{side}, {side}] for each of {len(shapes)} weights"
    before = timer.ms(f"{prefix}backward", alone, rule)
    rule = f"the same with overlap='backward', until {UNTIL[transport]}"
    both = timer.ms(f"{prefix}backward_reduce", with_reduction, rule)
    exposed = max(both - before, 0.0)
    target = MOST_EXPOSED if timer.device.type == "cuda" else None
    rule = (
        f"what the reduction, until {UNTIL[transport]}, adds to a backward pass of {before / reduction:.1f} "
        "times its length, over it"
    )
    timer.session.count(f"{prefix}exposed/{timer.places}", "ratio", exposed / reduction, rule, target=target)
