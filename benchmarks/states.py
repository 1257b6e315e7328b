"""Whole steps with full and with compact optimizer state, beside what updates bfloat16 parameters alone."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.peers import flash_adamw
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Run, Session
from benchmarks.step import Passes, with_gradients
from benchmarks.workloads import ADAMW, Shapes, elements_of, parameters_of, weight_shapes
from zerofp4.launch import World
from zerofp4.optim import Communication, FusedAdamW, ZeroFP4Optimizer

TOKENS = 16
"""Of passes that make gradients: so few that activations are small beside what is kept."""

Made = tuple[list[nn.Parameter], torch.optim.Optimizer, Run]


def ours(shapes: Shapes, device: torch.device, *, state: str, overlap: str | None = None) -> Made:
    parameters = parameters_of(shapes, device, columnwise=False)
    communication = Communication(overlap=overlap)
    optimizer = ZeroFP4Optimizer(parameters, FusedAdamW, state=state, communication=communication, **ADAMW)
    if overlap is None:
        with_gradients(parameters)
        return parameters, optimizer, optimizer.step
    passes = Passes(parameters, TOKENS)

    def run() -> None:
        with torch.enable_grad():
            passes.run()
        optimizer.step()

    return parameters, optimizer, run


def in_bf16(shapes: Shapes, device: torch.device, *, flash: bool) -> Made:
    build = flash_adamw if flash else partial(torch.optim.AdamW, fused=True)
    values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    parameters = list(map(nn.Parameter, values))
    optimizer = build(parameters, **ADAMW)
    with_gradients(parameters)
    return parameters, optimizer, optimizer.step


compact = partial(ours, state="compact")
WAYS: dict[str, tuple[Callable[[Shapes, torch.device], Made], float, str]] = {
    "full": (partial(ours, state="full"), 14.6, "scan, update and cast, FP32 masters and moments"),
    "compact": (compact, 7.7, "the same, masters of 24 bits and moments of 8"),
    "in_backward": (partial(compact, overlap="update"), 5.9, f"two passes of {TOKENS} tokens, and updates"),
    "torch_bf16": (partial(in_bf16, flash=False), 8.0, "torch's fused AdamW in bf16, no masters"),
    "flash": (partial(in_bf16, flash=True), 7.2, "FlashAdamW, masters of 24 bits and moments of 8"),
}
"""What makes parameters, their optimizer and a step; bytes of an element, at least; the rule of a step."""


def states(session: Session, options: argparse.Namespace, world: World) -> None:
    """ZeroFP4Optimizer.step() of one rank with full and with compact state, beside AdamW in pure bf16.

    Ours look for a NaN or Inf, update, and cast to NVFP4 weights with rows only: nothing is transposed.
    FlashAdamW is measured where flashoptim can be imported. What is kept are weights, gradients and state;
    with updates in the backward pass gradients of a whole model never exist.

    At scale 1 full state needs 102 GB, and compact state 54 GB. What a GPU has no room for is left out.
    """
    if world.world_size > 1:
        raise ValueError("states measures one rank: start it without a launcher")
    timer, shapes, found = Timer(session, world, options.repeats), weight_shapes(options.scale), {}
    for name, (make, nbytes, rule) in WAYS.items():
        if timer.has_room(f"step_{name}", nbytes * elements_of(shapes)):
            found[name] = measure(timer, shapes, name, make, rule)
        free_memory(session.device)
    for name in ("full", "torch_bf16", "flash"):
        if found.get("compact") and found.get(name):
            rule = f"step of ours with compact state over step_{name}"
            timer.count(f"step_compact_over_{name}", "ratio", found["compact"] / found[name], rule)


def measure(timer: Timer, shapes: Shapes, name: str, make: Callable[..., Made], rule: str) -> float | None:
    """Milliseconds of a step; None where what it needs cannot be imported."""
    torch.manual_seed(0)
    try:
        parameters, optimizer, run = make(shapes, timer.device)
    except (ImportError, NotImplementedError) as error:
        timer.session.say(f"step_{name} is left out: {error}")
        return None
    elements = elements_of(shapes)
    with torch.no_grad(), timer.peak(f"memory_{name}", "weights, gradients and state included") as peak:
        found = timer.ms(f"step_{name}", run, rule)
    for megabytes in peak:
        rule = "the peak of steps over the number of weights' elements"
        timer.count(f"peak_{name}", "bytes_per_parameter", megabytes * MEGABYTES / elements, rule)
    if isinstance(optimizer, ZeroFP4Optimizer):
        kept = [tensor for p in parameters for tensor in (p, p.grad, *optimizer.state[p].values())]
        size = sum(tensor.nbytes for tensor in kept if tensor is not None) / elements
        timer.count(f"kept_{name}", "bytes_per_parameter", size, "weights, gradients and state")
    return found
