"""How much of a reduction of gradients, and of a step, is left behind a backward pass of matrix products."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

import zerofp4
from benchmarking.timer import Timer
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer

LONGER = 2.0
"""The backward pass takes at least so many times as long as the reduction alone."""
MOST_HOST = 0.8
"""Of the time of the passes the host may take so much to queue them, or it would be the host's work that is
measured.
"""
MOST_EXPOSED = 0.10
MOST_OF_STEP = {(4, "peer"): 0.35}
"""By number of GPUs and transport, the part of a bf16 step that a step may add to such passes."""
UNTIL = {
    "collective": "gradients are averaged",
    "peer": "those of all ranks are here, which AdamW adds up as it reads them",
}
"""By transport, what a step waits for before it updates."""
FEWEST_TOKENS = {"cuda": 1024, "cpu": 16}
ROUGHLY = 3
"""Repeats while the number of tokens is looked for."""


class Passes:
    """Forward and backward passes through layers that do not follow one another, each a product of the same
    tokens with its weight, whose gradient the backward pass makes, and that of the tokens.
    """

    def __init__(self, parameters: list[nn.Parameter], tokens: int):
        options = {"device": parameters[0].device, "dtype": torch.bfloat16}
        shapes = [parameter.shape for parameter in parameters]
        self._parameters, self.tokens = parameters, tokens
        self._inputs = {k: torch.randn(tokens, k, **options).requires_grad_() for _, k in shapes}
        self._grads = {n: torch.randn(tokens, n, **options).mul_(1e-2) for n, _ in shapes}

    @torch.enable_grad()
    def forward(self) -> list[torch.Tensor]:
        return [F.linear(self._inputs[p.shape[1]], p) for p in self._parameters]

    def both(self) -> None:
        for x in self._inputs.values():
            x.grad = None
        outputs = self.forward()
        torch.autograd.backward(outputs, [self._grads[y.shape[1]] for y in outputs])


def measure_hiding(
    timer: Timer,
    shapes: list[tuple[int, int]],
    bucket_mb: float | None,
    transport: str,
    prefix: str,
    reduction: float,
    bf16_step: float | None,
) -> None:
    """prefix: of the names of rows. reduction: milliseconds of one that nothing hides. bf16_step: those of a
    whole step of bf16, None where there is none to compare with.
    """
    options = {"device": timer.device, "dtype": torch.bfloat16}
    parameters = [
        nn.Parameter(zerofp4.quantize(torch.randn(shape, **options), columnwise=True)) for shape in shapes
    ]
    optimizer = ZeroFP4Optimizer(
        parameters, FusedAdamW, overlap="backward", transport=transport, bucket_mb=bucket_mb
    )

    def alone(passes: Passes) -> None:
        optimizer.zero_grad()
        with optimizer.no_sync():
            passes.both()

    def with_reduction(passes: Passes) -> None:
        optimizer.zero_grad()
        passes.both()
        with torch.no_grad():
            optimizer._rounds.close()
            optimizer._rounds.settle(again=False)
            if transport == "peer":
                optimizer._reducer.begin([])
            else:
                optimizer._reducer.reduce([])

    def with_step(passes: Passes) -> None:
        optimizer.zero_grad()
        passes.both()
        optimizer.step()

    tokens, forward, before, host = FEWEST_TOKENS[timer.device.type], 0.0, 0.0, 0.0
    while before - forward < LONGER * reduction or host > MOST_HOST * before:
        passes = Passes(parameters, tokens)
        forward = timer.time(passes.forward, repeats=ROUGHLY)
        before = timer.time(functools.partial(alone, passes), repeats=ROUGHLY)
        if timer.device.type == "cuda":
            host = timer.host_time(functools.partial(with_reduction, passes), repeats=ROUGHLY)
        tokens *= 2

    runs = [functools.partial(run, passes) for run in (alone, with_reduction, with_step)]
    forward, before, both, stepped = timer.in_turns(passes.forward, *runs)
    rule = f"forward and backward passes of {len(shapes)} weights with {passes.tokens} tokens"
    timer.count_ms(f"{prefix}backward", before, rule)
    rule = f"the same, in turns, with overlap='backward', until {UNTIL[transport]}"
    timer.count_ms(f"{prefix}backward_reduce", both, rule)
    exposed = max(both - before, 0.0)
    on_gpu = timer.device.type == "cuda"
    longer = (before - forward) / reduction
    rule = (
        f"what the reduction, until {UNTIL[transport]}, adds to passes of which the backward one takes "
        f"{longer:.1f} times as long, over it"
    )
    target = MOST_EXPOSED if on_gpu else None
    timer.session.count(f"{prefix}exposed/{timer.places}", "ratio", exposed / reduction, rule, target=target)
    timer.count_ms(f"{prefix}backward_step", stepped, "the same, with step() behind them")
    if bf16_step is not None:
        target = MOST_OF_STEP.get((timer.world.world_size, transport)) if on_gpu else None
        rule = "what step() adds to the passes, gradients included, over the bf16 step, which nothing hides"
        row = f"{prefix}exposed_step_over_bf16/{timer.places}"
        timer.session.count(row, "ratio", max(stepped - before, 0.0) / bf16_step, rule, target=target)
