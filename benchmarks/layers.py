"""Layers that multiply quantized operands, beside those of torch that multiply bfloat16."""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

import zerofp4
from benchmarks.session import Run, Session
from benchmarks.workloads import shape_name
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


class Case:
    """A product of torch in bfloat16, and a layer of ours with the same input and the same gradient. name: of
    rows. weight: of torch's product. sizes: tokens, in_features, out_features of both.
    """

    def __init__(self, session: Session, name: str, weight: torch.Tensor, sizes: Sequence[int]):
        self.session, self.name, self.weight = session, name, weight
        tokens, in_features, out_features = sizes
        self.x = random(session, tokens, in_features).requires_grad_()
        self.gradient = random(session, tokens, out_features)

    def milliseconds(self, row: str, call: Callable, rule: str, *layers: nn.Module) -> float:
        """Of a forward and a backward pass, with a row of them."""
        run = trained(call, self.x, self.gradient, *layers)
        moved = self.x.nbytes + self.weight.nbytes + self.gradient.nbytes
        return count_passes(self.session, f"{row}/{self.name}", run, moved, rule)

    def compare(self, prefix: str, layer: nn.Module, theirs: float, *more: object) -> None:
        """Rows of our layer, which takes `more` behind its input, beside `theirs` in milliseconds."""

        def call(given: torch.Tensor) -> torch.Tensor:
            return layer(given, *more, False)

        with autocast(RECIPE):
            layer(self.x, *more, True)
            rule = f"zerofp4.nn.{type(layer).__name__}, exact, weights cached"
            ours = self.milliseconds(f"{prefix}linear", call, rule, layer)
            saved = saved_bytes(call, self.x)
        row = f"{prefix}saved_over_bf16/{self.name}"
        rule = "bytes saved for the backward pass, over those of the input in bfloat16"
        self.session.count(row, "ratio", saved / self.x.nbytes, rule, bytes=saved)
        self.over_bf16(f"{prefix}linear", ours / theirs)

    def over_bf16(self, row: str, ratio: float) -> None:
        self.session.count(f"{row}_over_bf16/{self.name}", "ratio", ratio, "time over that of bfloat16")


def linear(session: Session, *sizes: int) -> None:
    """sizes: tokens, in_features, out_features."""
    name, options = shape_name(sizes), {"bias": False, "device": session.device, "dtype": torch.bfloat16}
    plain = nn.Linear(*sizes[1:], **options)
    case = Case(session, name, plain.weight, sizes)
    theirs = case.milliseconds("bf16_linear", plain, "torch's linear in bfloat16")
    case.compare("", Linear(*sizes[1:], **options), theirs)
    zerofp4.convert_model(nn.Sequential(plain), block=(16, 16))
    rule = "torch's linear layer after convert_model()"
    ours = case.milliseconds("converted_linear", plain, rule, plain)
    case.over_bf16("converted_linear", ours / theirs)
    held = plain.weight.nbytes / plain.weight.numel()
    session.count(f"converted_weight/{name}", "bytes_per_parameter", held, "all buffers of the weight")


def without_instructions(session: Session) -> None:
    """torch's linear layer with an NVFP4 weight beside the same in bfloat16 and in float32."""
    tokens, in_features, out_features = CPU_SHAPE
    name, found = shape_name(CPU_SHAPE), {}
    for kind in ("bf16", "float32", "converted"):
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        layer = nn.Linear(in_features, out_features, bias=False, dtype=dtype)
        if kind == "converted":
            zerofp4.convert_model(nn.Sequential(layer), block=(16, 16))
        x = random(session, tokens, in_features).to(dtype).requires_grad_()
        run = trained(layer, x, random(session, tokens, out_features).to(dtype), layer)
        rule = f"torch's linear layer, {kind}"
        found[kind] = count_passes(session, f"cpu_{kind}_linear/{name}", run, 3 * x.nbytes, rule)
    for other in ("bf16", "float32"):
        row, rule = f"cpu_converted_linear_over_{other}/{name}", f"time over that of {other}"
        session.count(row, "ratio", found["converted"] / found[other], rule)


def experts(session: Session, scale: int) -> None:
    """Tokens in equal parts."""
    count = max(2, EXPERTS // scale)
    in_features, out_features = (scaled(size, scale) for size in EXPERT_SHAPE)
    rows = scaled(EXPERT_TOKENS // EXPERTS, scale)
    weight = nn.Parameter(random(session, count, out_features, in_features))
    offsets = torch.arange(1, count + 1, dtype=torch.int32, device=session.device) * rows

    def product(given: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(given, weight.transpose(-2, -1), offs=offsets)

    name = shape_name((count, rows, in_features, out_features))
    case = Case(session, name, weight, (count * rows, in_features, out_features))
    theirs = case.milliseconds("bf16_grouped_mm", product, "torch's grouped_mm in bfloat16")
    options = {"bias": False, "device": session.device, "dtype": torch.bfloat16}
    layer = GroupedLinear(count, in_features, out_features, **options)
    case.compare("grouped_", layer, theirs, [rows] * count)


def count_passes(session: Session, row: str, run: Run, moved: float, rule: str) -> float:
    """Milliseconds of a forward and a backward pass, which move so many bytes, with a row of them."""
    seconds, runs = session.clock.seconds(run, moved)
    session.count(row, "milliseconds", seconds * 1e3, f"forward and backward of {rule}", runs=runs)
    return seconds * 1e3


def random(session: Session, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=session.device, dtype=torch.bfloat16)


def trained(call: Callable, x: torch.Tensor, gradient: torch.Tensor, *layers: nn.Module) -> Run:
    """A forward and a backward pass that makes its gradients anew."""

    def run() -> None:
        x.grad = None
        for layer in layers:
            layer.zero_grad()
        call(x).backward(gradient)

    return run


def saved_bytes(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Bytes that autograd saves of a forward pass, each address once, without what another input's pass saves
    at the same address: that is kept anyway.
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
    """Of passes of a layer, of the forward pass beyond F.linear, and of quantizing a weight again."""
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
