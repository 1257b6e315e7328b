"""Training steps of FSDP2 with gathers in 4 bits, beside those of fully_shard with bfloat16 parameters."""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn import functional as F

import zerofp4
from benchmarks.ranks import MEGABYTES, Timer, free_memory
from benchmarks.session import Session
from zerofp4.integrations import fsdp2 as integration
from zerofp4.launch import World

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 4
"""That follow each other without waiting for the device, as in training: what is timed at once."""


class Shape(NamedTuple):
    """vocabulary: 0 for layers alone, which take and give what is between layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 0

    def reduced(self, scale: int, layers: int | None) -> "Shape":
        """With dimensions divided by scale and, where they are given, so many layers."""
        sizes = (self.hidden // scale, self.intermediate // scale, max(self.heads // scale, self.kv_heads))
        return Shape(layers or self.layers, *sizes, self.kv_heads, self.vocabulary // scale)


LLAMA_8B = Shape(8, 4096, 14336, 32, 8)
"""A quarter of Llama-3-8B: layers of 218 million parameters."""

QWEN_1_5B = Shape(28, 1536, 8960, 12, 2, 151936)
"""Qwen2.5-1.5B: 47 million parameters a layer, and an embedding that is the output layer too."""

SMALL = Shape(8, 128, 256, 4, 2)

CASES = {"reshard": (LLAMA_8B, True), "keep": (LLAMA_8B, False), "1.5b": (QWEN_1_5B, True)}
"""The model and its reshard_after_forward, by what rows call both."""

WAYS = {"": "in 4 bits", "_bf16": "in bfloat16", "_float8": "by torchao in float8, products in float8 too"}
"""How weights are gathered, with what the names of rows end with."""


class Block(nn.Module):
    """A layer without rotations."""

    def __init__(self, shape: Shape, linear: type[nn.Linear]):
        super().__init__()
        hidden, intermediate = shape.hidden, shape.intermediate
        self.heads = shape.heads, shape.kv_heads
        kv = hidden // shape.heads * shape.kv_heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.query, self.output = (linear(hidden, hidden, bias=False) for _ in range(2))
        self.key, self.value = (linear(hidden, kv, bias=False) for _ in range(2))
        self.gate, self.up = (linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norms[0](x)
        sizes = zip((self.query, self.key, self.value), (self.heads[0], *self.heads[1:] * 2), strict=True)
        query, key, value = (
            layer(given).unflatten(-1, (heads, -1)).transpose(-3, -2) for layer, heads in sizes
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(-3, -2).flatten(-2))
        given = self.norms[1](x)
        return x + self.down(F.silu(self.gate(given)) * self.up(given))


class Decoder(nn.Module):
    """The layers of a shape, from tokens to logits where it has an embedding."""

    def __init__(self, shape: Shape, linear: type[nn.Linear] = nn.Linear):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden) if shape.vocabulary else None
        self.blocks = nn.ModuleList(Block(shape, linear) for _ in range(shape.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.tokens is None else F.linear(x, self.tokens.weight)


class CountedGather(DefaultAllGather):
    """torch's all-gather, which adds to `calls` itself and the bytes that a call brought."""

    def __init__(self, calls: list[tuple["CountedGather", int]]):
        self._calls = calls

    def __call__(self, output_tensor: torch.Tensor, *args: Any, **kwargs: Any):
        self._calls.append((self, output_tensor.nbytes))
        return super().__call__(output_tensor, *args, **kwargs)


def in_kernels(run: Callable[[], object]) -> torch.Tensor:
    """Milliseconds of NCCL's all-gathers in one call of run(), each on the rank that came to it last: the
    others' times have their waiting in them. The profiler begins a call earlier, in which it slows the host.
    """
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profile:
        for _ in range(2):
            run()
            torch.cuda.synchronize()
            profile.step()
    kernels = [e for e in profile.events() if e.device_type == DeviceType.CUDA and "AllGather" in e.name]
    kernels.sort(key=lambda event: event.time_range.start)
    times = [event.time_range.elapsed_us() / 1e3 for event in kernels]
    shortest = torch.tensor(times, dtype=torch.float64, device="cuda")
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    return shortest.cpu()


def fsdp2(session: Session, options: argparse.Namespace, world: World) -> None:
    """Steps of a sharded model of Llama-3-8B's layers, gathered in 4 bits and in bf16, resharded or kept.

    FP32 masters, bf16 parameters and products, gradients reduced in FP32, torch's fused AdamW. `gather` is
    the time that NCCL's kernels take for the all-gathers of the layers in one step, from a profile. 1.5b is a
    whole model of smaller layers. float8 is measured where torchao can be imported. `link` is the rate of one
    large all-gather: NCCL_P2P_DISABLE=1, and NCCL_SHM_DISABLE=1 beside it, make it slow. One rank alone has
    no link, and measures what a small layer that is kept costs the host.
    """
    timer = Timer(session, world, options.repeats)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    if world.world_size > 1:
        count_link(timer)
    for case in options.cases:
        shape = CASES[case][0].reduced(options.scale, options.layers)
        ways = WAYS if case == "reshard" else ("", "_bf16")
        ours, theirs, *_ = (measure(timer, options.tokens, mesh, case, shape, way) for way in ways)
        for part in (part for part in ours if theirs[part]):  # one rank alone gathers nothing
            kind, rule = "ratio", f"{part} of ours over that of bf16"
            if part == "tokens":
                kind, rule = "speedup", "tokens a second of ours over those of bf16"
            timer.count(f"{case}/{part}_over_bf16", kind, ours[part] / theirs[part], rule)
    count_resident(timer, mesh, LLAMA_8B.reduced(options.scale, 1))
    if world.world_size == 1:
        count_host(timer, mesh)


def count_link(timer: Timer) -> None:
    """Bytes that each rank receives from the others in an all-gather, over its time."""
    nbytes = 2**28 if timer.device.type == "cuda" else 2**20
    piece = torch.zeros(nbytes, dtype=torch.uint8, device=timer.device)
    whole = piece.new_empty(nbytes * timer.world.world_size)
    seconds = timer.time(lambda: dist.all_gather_into_tensor(whole, piece)) / 1e3
    rate = (whole.nbytes - nbytes) / seconds / 1e9
    rule = f"received by a rank in an all-gather of {nbytes >> 20} MiB each"
    timer.count("link", "gigabytes_per_second", rate, rule)


def measure(
    timer: Timer, tokens: int, mesh: DeviceMesh, case: str, shape: Shape, way: str
) -> dict[str, float]:
    """Adds the rows of one model, and returns what is to be compared; nothing where torchao is not here."""
    device, is_cuda = timer.device, timer.session.clock.is_cuda
    name, how, reshards = f"{case}{way}", f"gathered {WAYS[way]}", CASES[case][1]
    if way == "_float8" and (not is_cuda or importlib.util.find_spec("torchao") is None):
        timer.session.say(f"{name} is left out: it needs a GPU and torchao")
        return {}
    before = free_memory(device)
    torch.manual_seed(0)
    with device:
        model = Decoder(shape)
    if shape.vocabulary:
        x = torch.randint(shape.vocabulary, (1, tokens), device=device)
    else:
        x = torch.randn(1, tokens, shape.hidden, device=device, dtype=torch.bfloat16)
    calls: list[tuple[CountedGather, int]] = []
    blocks, others = CountedGather(calls), CountedGather(calls)
    optimizer = shard(model, mesh, reshards, way)
    for block in model.blocks:
        block.set_custom_all_gather(blocks)
    model.set_custom_all_gather(others)

    def steps() -> None:
        calls.clear()
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if way == "_float8":  # of all weights at once, as torchao has it done after each step
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

                precompute_float8_dynamic_scale_for_fsdp(model)

    rule = f"forward, backward and optimizer, {how}, one of {STEPS} that follow each other"
    with timer.peak(f"{name}/peak", f"model and optimizer included, {how}", before) as peak:
        step = timer.ms(f"{name}/step", steps, rule, parts=STEPS)

    def count(part: str, kind: str, value: float, rule: str) -> float:
        timer.count(f"{name}/{part}", kind, value, f"{rule}, {how}")
        return value

    rate = tokens * timer.world.world_size / (step / 1e3)
    found = {"tokens": count("tokens", "tokens_per_second", rate, "of all ranks")}
    if is_cuda:
        (found["peak"],) = peak
        of_blocks = 0.0
        if timer.world.world_size > 1:
            times = in_kernels(steps)
            if len(times) != len(calls):
                raise RuntimeError(f"{len(calls)} all-gathers, and {len(times)} kernels of NCCL for them")
            of_blocks = times[[gather is blocks for gather, _ in calls]].sum().item() / STEPS
        rule = "in NCCL's kernels for the layers in a step, without waiting for other ranks"
        found["gather"] = count("gather", "milliseconds", of_blocks, rule)
    moved = sum(nbytes for gather, nbytes in calls if gather is blocks) / STEPS / MEGABYTES
    rule = "brought to each rank by the all-gathers of the layers in a step"
    found["gathered"] = count("gathered", "megabytes", moved, rule)
    return found


def shard(
    model: Decoder, mesh: DeviceMesh, reshards: bool, way: str, columnwise: bool | None = None
) -> torch.optim.Optimizer:
    if way == "":
        integration.prepare(model, columnwise=columnwise, block=(16, 16))
    elif way == "_float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if way == "":
        integration.attach(model, optimizer)
    return optimizer


def count_resident(timer: Timer, mesh: DeviceMesh, shape: Shape) -> None:
    """What layers multiply, while it is gathered: of torch's linear layers, of ours, and of bf16."""
    for name, linear in (("rows", nn.Linear), ("rows_and_columns", zerofp4.nn.Linear), ("bf16", nn.Linear)):
        free_memory(timer.device)
        with timer.device:
            model = Decoder(shape, linear)
        is_ours = name != "bf16"
        optimizer = shard(model, mesh, False, "" if is_ours else "_bf16", name == "rows_and_columns")
        block = model.blocks[0]
        block.unshard()
        weights = [p for p in block.parameters() if p.dim() == 2]
        numel = sum(weight.numel() for weight in weights)
        held = sum(weight.nbytes for weight in weights) / numel
        rule = f"gathered weights{': codes and scales' if is_ours else ' in bfloat16'}"
        timer.count(f"resident/{name}", "bytes_per_parameter", held, rule)
        block.reshard()
        del model, block, optimizer, weights


def count_host(timer: Timer, mesh: DeviceMesh) -> None:
    """Both passes of layers that stay gathered, so small that nothing but the host counts."""
    runs = []
    for way in ("", "_bf16"):
        with timer.device:
            model = Decoder(SMALL)
        optimizer = shard(model, mesh, False, way)  # kept alive: it makes the weights
        x = torch.randn(1, 4, SMALL.hidden, device=timer.device, dtype=torch.bfloat16)
        runs.append(lambda model=model, x=x, _=optimizer: model(x).square().mean().backward())
    ours, bf16 = (found * 1e3 / SMALL.layers for found in timer.in_turns(*runs, of_host=True))
    for name, found, way in (("host_layer", ours, ""), ("host_layer_bf16", bf16, "_bf16")):
        timer.count(name, "host_us", found, f"forward and backward of a layer that is kept, {WAYS[way]}")
    timer.count("host_layer_over_bf16", "ratio", ours / bf16, "host time of ours over that of bf16")
