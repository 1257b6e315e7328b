"""Layers that multiply quantized operands, beside those of torch that multiply bfloat16."""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

import zerofp4
from benchmarking.session import Session
from zerofp4.layout import round_up
from zerofp4.nn import GroupedLinear, Linear, NVFP4Recipe, autocast

RECIPES = {
    "linear": NVFP4Recipe(backend="exact"),
    "linear_kept_dequantized": NVFP4Recipe(backend="exact", cache="dequantized"),
}
SHAPES = ((8192, 4096, 14336), (16384, 8192, 8192), (8192, 4096, 4096))
"""Tokens, in_features, out_features."""
EXPERTS, EXPERT_TOKENS, EXPERT_SHAPE = 64, 65536, (2048, 1408)
MICRO_BATCHES = (1, 4, 16)
SIDE = 32
"""Of a layer so small that nothing but the host counts."""
SWIZZLES = ("layout_kernel", "layout_list_kernel")
"""Kernels that bring scales to another layout, by a part of their names."""


def layers(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.nn.Linear and GroupedLinear with cached weights beside torch's in bfloat16; what they save."""
    for shape in SHAPES:
        tokens, *sizes = (scaled(size, options.scale) for size in shape)
        linear(session, tokens, *sizes)
    experts(session, options.scale)
    host_calls(session)
    if session.clock.is_cuda:
        for count in MICRO_BATCHES:
            swizzles(session, count)
    else:
        session.say("launches are a GPU's: left out on a CPU")


def scaled(size: int, scale: int) -> int:
    """A dimension, smaller by that, of which the products of every backend and of torch can be made."""
    return round_up(max(size // scale, 1), 32)


def linear(session: Session, tokens: int, in_features: int, out_features: int) -> None:
    options = {"bias": False, "device": session.device, "dtype": torch.bfloat16}
    x, gradient = random(session, tokens, in_features), random(session, tokens, out_features)
    x.requires_grad_()
    name = f"{tokens}x{in_features}x{out_features}"
    plain = nn.Linear(in_features, out_features, **options)
    moved = x.nbytes + plain.weight.nbytes + gradient.nbytes
    rule = "forward and backward of nn.Linear in bfloat16"
    theirs = milliseconds(session, f"bf16_linear/{name}", trained(plain, x, gradient), moved, rule)
    for kind, recipe in RECIPES.items():
        layer = Linear(in_features, out_features, **options)
        with autocast(recipe):
            layer(x, True)
            run = trained(lambda given, layer=layer: layer(given, False), x, gradient, layer)
            rule = f"forward and backward of nn.Linear, exact, weight cached: {recipe.cache}"
            ours = milliseconds(session, f"{kind}/{name}", run, moved, rule)
            if kind == "linear":
                saved = saved_bytes(lambda layer=layer: layer(x, False), kept_of(layer))
                count_saved(session, f"saved_over_bf16/{name}", saved, x.nbytes)
        session.count(f"{kind}_over_bf16/{name}", "ratio", ours / theirs, "time over that of bfloat16")


def experts(session: Session, scale: int) -> None:
    """Tokens in equal parts."""
    count = max(2, EXPERTS // scale)
    in_features, out_features = (scaled(size, scale) for size in EXPERT_SHAPE)
    rows = scaled(EXPERT_TOKENS // EXPERTS, scale)
    splits, name = [rows] * count, f"{count}x{rows}x{in_features}x{out_features}"
    x, gradient = random(session, count * rows, in_features), random(session, count * rows, out_features)
    x.requires_grad_()
    weight = nn.Parameter(random(session, count, out_features, in_features))
    offsets = torch.arange(1, count + 1, dtype=torch.int32, device=session.device) * rows
    moved = x.nbytes + weight.nbytes + gradient.nbytes

    def product(given: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(given, weight.transpose(-2, -1), offs=offsets)

    rule = "forward and backward of torch's grouped_mm in bfloat16"
    theirs = milliseconds(session, f"bf16_grouped_mm/{name}", trained(product, x, gradient), moved, rule)
    options = {"bias": False, "device": session.device, "dtype": torch.bfloat16}
    for kind, recipe in RECIPES.items():
        layer = GroupedLinear(count, in_features, out_features, **options)
        with autocast(recipe):
            layer(x, splits, True)
            run = trained(lambda given, layer=layer: layer(given, splits, False), x, gradient, layer)
            rule = f"forward and backward of nn.GroupedLinear, exact, weights cached: {recipe.cache}"
            ours = milliseconds(session, f"grouped_{kind}/{name}", run, moved, rule)
            if kind == "linear":
                saved = saved_bytes(lambda layer=layer: layer(x, splits, False), kept_of(layer))
                count_saved(session, f"grouped_saved_over_bf16/{name}", saved, x.nbytes)
        rule = "time over that of bfloat16"
        session.count(f"grouped_{kind}_over_bf16/{name}", "ratio", ours / theirs, rule)
    host_of_experts(session, count)


def host_of_experts(session: Session, count: int) -> None:
    """What a forward and a backward pass of so many small experts keep the host."""
    x, layer = random(session, count * SIDE, SIDE), GroupedLinear(count, SIDE, SIDE, bias=False)
    layer.to(session.device, torch.bfloat16)
    run = trained(lambda given: layer(given, [SIDE] * count, False), x.requires_grad_(), x.detach(), layer)
    with autocast(RECIPES["linear"]):
        layer(x, [SIDE] * count, True)
        host = session.clock.host_us(run)
    rule = "forward and backward of nn.GroupedLinear, weights cached"
    session.count(f"host_grouped_linear/{count}", "host_us", host, rule)


def random(session: Session, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=session.device, dtype=torch.bfloat16)


def trained(
    call: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    gradient: torch.Tensor,
    module: nn.Module | None = None,
) -> Callable[[], None]:
    """A forward and a backward pass that makes its gradients anew."""

    def run() -> None:
        x.grad = None
        if module is not None:
            module.zero_grad()
        call(x).backward(gradient)

    return run


def milliseconds(session: Session, name: str, run: Callable[[], object], moved: int, rule: str) -> float:
    """Add the time of a call as a row, and return it."""
    seconds, runs = session.clock.seconds(run, moved)
    session.count(name, "milliseconds", seconds * 1e3, rule, runs=runs)
    return seconds * 1e3


def kept_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """What a layer's caches hold, and parameters: no activations."""
    yield from module.parameters()
    for each in module.modules():
        cache = getattr(each, "_weight_cache", None)
        if cache is not None and cache._tensor is not None:
            yield from (buffer for _, buffer in cache._tensor.record.buffers())


def saved_bytes(forward: Callable[[], torch.Tensor], kept: Iterator[torch.Tensor]) -> int:
    """Bytes that autograd saves of a forward pass, each address once, without what is kept anyway."""
    known, saved = {tensor.data_ptr() for tensor in kept if type(tensor) is not zerofp4.NVFP4Tensor}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(saved.values())


def count_saved(session: Session, name: str, saved: int, bf16: int) -> None:
    rule = "bytes saved for the backward pass, over those of the input in bfloat16"
    session.count(name, "ratio", saved / bf16, rule, bytes=saved)


def host_calls(session: Session) -> None:
    """What a forward pass keeps the host beyond F.linear, and what quantizing a weight again does."""
    x = random(session, SIDE, SIDE)
    layer = Linear(SIDE, SIDE, device=session.device, dtype=torch.bfloat16).requires_grad_(False)
    plain = session.clock.host_us(lambda: F.linear(x, layer.weight, layer.bias))
    with autocast(RECIPES["linear"]):
        layer(x, True)
        ours = session.clock.host_us(lambda: layer(x, False))
    rule = "Linear forward with a cached weight, no gradients, less F.linear"
    session.count("host_layer_linear", "host_us", ours - plain, rule, plain_us=plain)
    quantizer = zerofp4.Quantizer(columnwise=True)
    out = quantizer(x)
    update = session.clock.host_us(lambda: quantizer.update_(out, x))
    session.count("host_quantizer_update", "host_us", update, "Quantizer.update_, both copies of a weight")


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
        with autocast(RECIPES["linear"]):
            for _ in range(count):
                model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kernels = session.clock.kernels(step)
    found = sum(number for name, number in kernels.items() if any(part in name for part in SWIZZLES))
    rule = f"kernels that swizzle scales in a step of {count} micro-batches"
    session.count(f"launches/swizzles/{count}", "launches", found, rule)
