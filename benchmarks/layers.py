"""Layers that multiply quantized operands, beside those of torch that multiply bfloat16."""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import zerofp4
from benchmarks.session import Session
from zerofp4.layout import round_up
from zerofp4.nn import GroupedLinear, Linear, NVFP4Recipe, autocast
from zerofp4.ops import SLOW_ON_CPU

RECIPE = NVFP4Recipe(backend="exact")
SHAPES = ((8192, 4096, 14336), (16384, 8192, 8192), (8192, 4096, 4096))
"""Tokens, in_features, out_features."""
CPU_SHAPE = (256, 1024, 1024)
"""The same on a CPU without instructions for bfloat16, whatever the scale."""
EXPERTS, EXPERT_TOKENS, EXPERT_SHAPE = 64, 65536, (2048, 1408)
MICRO_BATCHES = (1, 4, 16)
SIDE = 32
"""Of a layer so small that nothing but the host counts."""
SWIZZLES = ("layout_kernel", "layout_list_kernel")
"""Kernels that bring scales to another layout, by a part of their names."""


def layers(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.nn.Linear and GroupedLinear with cached weights beside torch's in bfloat16; what they save."""
    for shape in SHAPES:
        linear(session, *(scaled(size, options.scale) for size in shape))
    experts(session, options.scale)
    host_calls(session)
    if not session.clock.is_cuda and torch.bfloat16 in SLOW_ON_CPU:
        without_instructions(session)
    for count in MICRO_BATCHES if session.clock.is_cuda else ():
        swizzles(session, count)


def scaled(size: int, scale: int) -> int:
    """A dimension, smaller by that, of which the products of every backend and of torch can be made."""
    return round_up(max(size // scale, 1), 32)


def linear(session: Session, tokens: int, in_features: int, out_features: int) -> None:
    options = {"bias": False, "device": session.device, "dtype": torch.bfloat16}
    plain = nn.Linear(in_features, out_features, **options)
    make = functools.partial(Linear, in_features, out_features, **options)
    case = Case("", f"{tokens}x{in_features}x{out_features}", "linear", plain, plain.weight, make)
    x, gradient = random(session, tokens, in_features), random(session, tokens, out_features)
    theirs = compare(session, case, x, gradient)
    zerofp4.convert_model(nn.Sequential(plain))
    run, rule = trained(plain, x, gradient, plain), "torch's linear layer after convert_model()"
    ours = milliseconds(session, case, "converted_linear", run, x, gradient, rule)
    row = f"converted_linear_over_bf16/{case.name}"
    session.count(row, "ratio", ours / theirs, "time over that of bfloat16")
    held = plain.weight.nbytes / plain.weight.numel()
    session.count(f"converted_weight/{case.name}", "bytes_per_parameter", held, "all buffers of the weight")


def without_instructions(session: Session) -> None:
    """torch's linear layer with an NVFP4 weight beside the same in bfloat16 and in float32."""
    tokens, in_features, out_features = CPU_SHAPE
    name, found = "x".join(map(str, CPU_SHAPE)), {}
    for kind in ("bf16", "float32", "converted"):
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        layer = nn.Linear(in_features, out_features, bias=False, dtype=dtype)
        if kind == "converted":
            zerofp4.convert_model(nn.Sequential(layer))
        x = random(session, tokens, in_features).to(dtype).requires_grad_()
        gradient = random(session, tokens, out_features).to(dtype)
        seconds, runs = session.clock.seconds(trained(layer, x, gradient, layer), 3 * x.nbytes)
        rule, found[kind] = f"forward and backward of torch's linear layer, {kind}", seconds * 1e3
        session.count(f"cpu_{kind}_linear/{name}", "milliseconds", found[kind], rule, runs=runs)
    for other in ("bf16", "float32"):
        row, rule = f"cpu_converted_linear_over_{other}/{name}", f"time over that of {other}"
        session.count(row, "ratio", found["converted"] / found[other], rule)


def experts(session: Session, scale: int) -> None:
    """Tokens in equal parts."""
    count = max(2, EXPERTS // scale)
    sizes = in_features, out_features = [scaled(size, scale) for size in EXPERT_SHAPE]
    rows = scaled(EXPERT_TOKENS // EXPERTS, scale)
    weight = nn.Parameter(random(session, count, out_features, in_features))
    offsets = torch.arange(1, count + 1, dtype=torch.int32, device=session.device) * rows

    def product(given: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(given, weight.transpose(-2, -1), offs=offsets)

    options = {"bias": False, "device": session.device, "dtype": torch.bfloat16}
    make = functools.partial(GroupedLinear, count, *sizes, **options)
    name = f"{count}x{rows}x{in_features}x{out_features}"
    case = Case("grouped_", name, "grouped_mm", product, weight, make, ([rows] * count,))
    x, gradient = random(session, count * rows, in_features), random(session, count * rows, out_features)
    compare(session, case, x, gradient)


class Case(NamedTuple):
    """prefix, name: of rows. theirs: the name of torch's product, which call makes with weight. make: our
    layer, which takes `more` behind its input.
    """

    prefix: str
    name: str
    theirs: str
    call: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor
    make: Callable[[], nn.Module]
    more: tuple = ()


def milliseconds(
    session: Session,
    case: Case,
    row: str,
    run: Callable[[], None],
    x: torch.Tensor,
    gradient: torch.Tensor,
    rule: str,
) -> float:
    """Of a forward and a backward pass, with a row of them."""
    seconds, runs = session.clock.seconds(run, x.nbytes + case.weight.nbytes + gradient.nbytes)
    rule = f"forward and backward of {rule}"
    session.count(f"{row}/{case.name}", "milliseconds", seconds * 1e3, rule, runs=runs)
    return seconds * 1e3


def compare(session: Session, case: Case, x: torch.Tensor, gradient: torch.Tensor) -> float:
    """Rows of torch's product and of ours, and what ours saves for the backward pass. Returns
    the milliseconds of torch's.
    """
    prefix, name = case.prefix, case.name
    x.requires_grad_()
    run, rule = trained(case.call, x, gradient), f"torch's {case.theirs} in bfloat16"
    theirs = milliseconds(session, case, f"bf16_{case.theirs}", run, x, gradient, rule)
    layer = case.make()

    def call(given: torch.Tensor) -> torch.Tensor:
        return layer(given, *case.more, False)

    with autocast(RECIPE):
        layer(x, *case.more, True)
        rule = f"zerofp4.nn.{type(layer).__name__}, exact, weights cached"
        run = trained(call, x, gradient, layer)
        ours = milliseconds(session, case, f"{prefix}linear", run, x, gradient, rule)
        saved = saved_bytes(call, x)
    rule = "bytes saved for the backward pass, over those of the input in bfloat16"
    session.count(f"{prefix}saved_over_bf16/{name}", "ratio", saved / x.nbytes, rule, bytes=saved)
    row = f"{prefix}linear_over_bf16/{name}"
    session.count(row, "ratio", ours / theirs, "time over that of bfloat16")
    return theirs


def random(session: Session, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=session.device, dtype=torch.bfloat16)


def trained(call: Callable, x: torch.Tensor, gradient: torch.Tensor, *layers: nn.Module) -> Callable:
    """A forward and a backward pass that makes its gradients anew."""

    def run() -> None:
        x.grad = None
        for layer in layers:
            layer.zero_grad()
        call(x).backward(gradient)

    return run


def saved_bytes(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Bytes that autograd saves of a forward pass, each address once, without what is kept anyway: that is
    saved at the same address in a pass of another input.
    """
    first, second = ({}, {})
    outputs = []  # with what they save, so that no address is used again
    for saved in (first, second):

        def note(tensor: torch.Tensor, saved: dict = saved) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs.append(forward(x.detach().clone().requires_grad_()))
    return sum(tensor.nbytes for address, tensor in second.items() if address not in first)


def host_calls(session: Session) -> None:
    """What passes of a layer keep the host, the forward pass beyond F.linear, and what quantizing a weight
    again does.
    """
    x = random(session, SIDE, SIDE)
    layer = Linear(SIDE, SIDE, device=session.device, dtype=torch.bfloat16).requires_grad_(False)
    plain = session.clock.host_us(lambda: F.linear(x, layer.weight, layer.bias))
    with autocast(RECIPE):
        layer(x, True)
        rule = "Linear forward with a cached weight, no gradients, less F.linear"
        session.host("host_layer_linear", lambda: layer(x, False), rule, less=plain, plain_us=plain)
    layer.requires_grad_()
    gradient, x = random(session, SIDE, SIDE), x.clone().requires_grad_()
    with autocast(RECIPE):
        rule = "Linear forward and backward with a cached weight, all gradients"
        both = trained(lambda given: layer(given, False), x, gradient, layer)
        session.host("host_layer_linear_both", both, rule)
    quantizer = zerofp4.Quantizer(columnwise=True)
    x = x.detach()
    out = quantizer(x)
    rule = "Quantizer.update_, both copies of a weight"
    session.host("host_quantizer_update", lambda: quantizer.update_(out, x), rule)


def swizzles(session: Session, count: int) -> None:
    """Kernels that swizzle scales in a step of primary weights that have them, and of a cached weight."""
    model = nn.Sequential(*(Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    model.to(session.device)
    layouts = ("compact", "swizzled")
    for layer in model:
        value = zerofp4.quantize(layer.weight.detach(), columnwise=True, scale_layouts=layouts)
        layer.weight = nn.Parameter(value)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    quantizer = zerofp4.Quantizer(columnwise=True, scale_layouts=layouts)
    plain, x = random(session, SIDE, SIDE), random(session, SIDE, SIDE)
    cached = quantizer(plain)

    def step() -> None:
        quantizer.update_(cached, plain)
        with autocast(RECIPE):
            for _ in range(count):
                model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kernels = session.clock.kernels(step).items()
    found = sum(len(times) for name, times in kernels if any(part in name for part in SWIZZLES))
    rule = f"kernels that swizzle scales in a step of {count} micro-batches"
    session.count(f"launches/swizzles/{count}", "launches", found, rule)
