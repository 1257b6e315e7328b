"""Whole steps with full and with compact optimizer state, beside what updates bfloat16 parameters alone."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from zerofp4.launch import World
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4_bench.ranks import MEGABYTES, Timer, free_memory
from zerofp4_bench.session import Session
from zerofp4_bench.step import with_gradients
from zerofp4_bench.workloads import ADAMW, Shapes, elements_of, parameters_of, weight_shapes

Made = tuple[list[nn.Parameter], torch.optim.Optimizer]


def ours(shapes: Shapes, device: torch.device, *, state: str) -> Made:
    parameters = parameters_of(shapes, device, columnwise=False)
    return parameters, ZeroFP4Optimizer(parameters, FusedAdamW, state=state, **ADAMW)


def in_bf16(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in shapes]


def torch_bf16(shapes: Shapes, device: torch.device) -> Made:
    parameters = in_bf16(shapes, device)
    return parameters, torch.optim.AdamW(parameters, fused=True, **ADAMW)


def flash(shapes: Shapes, device: torch.device) -> Made:
    """FlashOptim 0.1.4: masters of 24 bits, moments of 8."""
    from flashoptim import FlashAdamW

    parameters = in_bf16(shapes, device)
    return parameters, FlashAdamW(parameters, **ADAMW)


class Way(NamedTuple):
    """make: parameters without gradients, and their optimizer. nbytes: for each element, at least."""

    make: Callable[[Shapes, torch.device], Made]
    nbytes: float
    rule: str


WAYS = {
    "full": Way(partial(ours, state="full"), 14.6, "scan, update and cast, FP32 masters and moments"),
    "compact": Way(partial(ours, state="compact"), 7.7, "the same, masters of 24 bits and moments of 8"),
    "torch_bf16": Way(torch_bf16, 8.0, "torch's fused AdamW of bf16 parameters and moments, no masters"),
    "flash": Way(flash, 7.2, "FlashAdamW of bf16 parameters, masters of 24 bits and moments of 8"),
}


def states(session: Session, options: argparse.Namespace, world: World) -> None:
    """ZeroFP4Optimizer.step() of one rank with full and with compact state, beside AdamW in pure bf16.

    Ours look for a NaN or Inf, update, and cast to NVFP4 weights with rows only: nothing is transposed.
    FlashAdamW is measured where flashoptim can be imported. What is kept are weights, gradients and state.

    At scale 1 full state needs 102 GB, and compact state 54 GB. What a GPU has no room for is left out.
    """
    if world.world_size > 1:
        raise ValueError("states measures one rank: start it without a launcher")
    timer, shapes, found = Timer(session, world, options.repeats), weight_shapes(options.scale), {}
    for name, way in WAYS.items():
        if timer.has_room(f"step_{name}", way.nbytes * elements_of(shapes)):
            found[name] = measure(timer, shapes, name, way)
        free_memory(session.device)
    compact = found.pop("compact", None)
    for name, milliseconds in found.items():
        if compact and milliseconds:
            rule = f"step of ours with compact state over step_{name}"
            timer.count(f"step_compact_over_{name}", "ratio", compact / milliseconds, rule)


def measure(timer: Timer, shapes: Shapes, name: str, way: Way) -> float | None:
    """Milliseconds of a step; None where what it needs cannot be imported."""
    torch.manual_seed(0)
    try:
        parameters, optimizer = way.make(shapes, timer.device)
    except ImportError as error:
        timer.session.say(f"step_{name} is left out: {error}")
        return None
    with_gradients(parameters)
    elements = elements_of(shapes)
    with torch.no_grad(), timer.peak(f"memory_{name}", "weights, gradients and state included") as peak:
        found = timer.ms(f"step_{name}", optimizer.step, way.rule)
    for megabytes in peak:
        rule = "the peak of steps over the number of weights' elements"
        timer.count(f"peak_{name}", "bytes_per_parameter", megabytes * MEGABYTES / elements, rule)
    if isinstance(optimizer, ZeroFP4Optimizer):
        kept = sum(t.nbytes for p in parameters for t in (p, p.grad, *optimizer.state[p].values()))
        timer.count(f"kept_{name}", "bytes_per_parameter", kept / elements, "weights, gradients and state")
    return found
