"""What is measured: named lists of weights, and what this process owns of each."""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div
from zerofp4.shard import Shard, intersect

ROOT = Path(__file__).resolve().parents[1]
RANK, RANKS = 1, 4  # whose slice of the Llama list is owned
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}  # in all steps that are compared
SMALL_SHAPES = ((768, 768), (256, 2880), (256, 2872))  # 2872 is no multiple of 16


Shapes = Sequence[tuple[int, int]]


def elements_of(shapes: Shapes) -> int:
    return sum(rows * cols for rows, cols in shapes)


def tiles_of(shapes: Shapes) -> int:
    return sum(ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK) for rows, cols in shapes)


class Piece(NamedTuple):
    """A weight of [rows, cols] and the part of it that this process owns."""

    shape: tuple[int, int]
    shard: Shard


@dataclasses.dataclass(frozen=True)
class Workload:
    """A list of weights, in rows called operation/name, or operation/name/part where the owner matters."""

    name: str
    pieces: tuple[Piece, ...]
    part: str | None = None

    @property
    def part_name(self) -> str:
        return self.name if self.part is None else f"{self.name}/{self.part}"

    @property
    def shapes(self) -> Shapes:
        return [shape for shape, _ in self.pieces]

    @cached_property
    def elements(self) -> int:
        return elements_of(self.shapes)

    @cached_property
    def owned(self) -> int:
        return sum(piece.shard.numel for piece in self.pieces)

    @cached_property
    def tiles(self) -> int:
        return tiles_of(self.shapes)


def square(size: int) -> Workload:
    """One weight of size x size, owned whole."""
    return whole(str(size), [(size, size)])


def whole(name: str, shapes: Iterable[tuple[int, int]]) -> Workload:
    """Weights of these shapes, owned whole."""
    return Workload(name, tuple(Piece(shape, Shard(0, shape[0] * shape[1])) for shape in shapes))


def reduced(size: int, scale: int) -> int:
    """A dimension divided by scale, even."""
    return max(2, size // scale // 2 * 2)


def large(scale: int = 1) -> Workload:
    """A matrix whose scales of 1x16 blocks are 268 MB."""
    shape = (reduced(131072, scale), 32768)
    return whole(shape_name(shape), [shape])


def groups(scale: int = 1) -> Workload:
    """64 matrices of one shape."""
    shape = (reduced(4096, scale), reduced(2048, scale))
    return whole(f"64x{shape_name(shape)}", [shape] * 64)


def llama_sizes(scale: int) -> Iterator[tuple[tuple[int, int], bool]]:
    """(rows, cols), divided by scale, of every parameter of Llama-3-8B in module order, and whether it is an
    NVFP4 weight.
    """
    vocabulary, width, key_value, hidden = (reduced(size, scale) for size in (128256, 4096, 1024, 14336))
    layer = [(width, width), (key_value, width), (key_value, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    yield (vocabulary, width), False
    for _ in range(32):
        for norm, weights in (((1, width), layer), ((1, width), mlp)):
            yield norm, False
            yield from ((shape, True) for shape in weights)
    yield (1, width), False
    yield (vocabulary, width), False


def weight_shapes(scale: int) -> list[tuple[int, int]]:
    """Those of the NVFP4 weights of Llama-3-8B."""
    return [shape for shape, is_weight in llama_sizes(scale) if is_weight]


def llama(scale: int = 1) -> Workload:
    """The 224 linear weights of Llama-3-8B's layers; a quarter of the model's flat buffer is owned."""
    sizes = list(llama_sizes(scale))
    total = sum(rows * cols for (rows, cols), _ in sizes)
    begin, end = total * RANK // RANKS, total * (RANK + 1) // RANKS
    pieces, offset = [], 0
    for (rows, cols), is_linear in sizes:
        if is_linear:
            pieces.append(Piece((rows, cols), intersect(offset, rows * cols, begin, end)))
        offset += rows * cols
    return Workload(scaled("llama3-8b", scale), tuple(pieces), f"rank{RANK}of{RANKS}")


def small(scale: int = 1) -> Workload:
    """2,000 small weights (divided by scale), each owned from an odd element to an odd end."""
    count = max(1, 2000 // scale)
    pieces = []
    for i in range(count):
        shape = SMALL_SHAPES[i % len(SMALL_SHAPES)]
        start, left_out = 1 + 2 * (i % 50), 1 + 2 * (i % 7)
        pieces.append(Piece(shape, Shard(start, shape[0] * shape[1] - start - left_out)))
    return Workload(f"{count}-small", tuple(pieces))


def many(count: int) -> Workload:
    """`count` weights so small that a step's time on the host is not that of its work."""
    return Workload(f"{count} of 32x32", (Piece((32, 32), Shard(1, 1022)),) * count)


def scaled(name: str, scale: int) -> str:
    return name if scale == 1 else f"{name}-scale{scale}"


def shape_name(shape: tuple[int, int]) -> str:
    return "x".join(map(str, shape))


SCALED = {
    "llama3-8b": llama,
    "2000-small": small,
    "268mb-scales": large,
    "64-groups": groups,
}
NAMES = ("square", *SCALED)
"""What --workload takes."""

LISTS = ("square", "llama3-8b", "2000-small")
"""Those of which a cast owns a part."""


def chosen(options: argparse.Namespace) -> Iterator[Workload]:
    """The workloads that the options ask for."""
    for name in options.workload:
        yield SCALED[name](options.scale) if name in SCALED else square(options.size)


def parameters_of(shapes: Shapes, device: torch.device, columnwise: bool = True) -> list[nn.Parameter]:
    """NVFP4 weights of normal values."""
    values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return [nn.Parameter(zerofp4.quantize(value, columnwise=columnwise)) for value in values]


CONFIGS = ROOT / "examples" / "configs"


def causal_model(config: Path, device: torch.device, scale: int = 1, layers: int | None = None) -> nn.Module:
    """The causal language model of a configuration of transformers, in bfloat16, with random weights. scale:
    divides all dimensions. layers: None for those of the configuration.
    """
    import transformers

    more = {} if layers is None else {"num_hidden_layers": layers}
    found = transformers.AutoConfig.from_pretrained(str(config), **more)
    if scale > 1:
        heads = "num_attention_heads", "num_key_value_heads"
        for name in ("hidden_size", "intermediate_size", *heads, "vocab_size"):
            setattr(found, name, max(getattr(found, name) // scale, 1))
        found.head_dim = found.hidden_size // found.num_attention_heads
    with device:
        return transformers.AutoModelForCausalLM.from_config(found, dtype=torch.bfloat16)


def causal_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> Callable[[], torch.Tensor]:
    """A call that trains such a model by one step and returns its loss. tokens: int64 [batch, length], or
    [micro-batches, batch, length], each predicted at its own place. context: of the forward pass.
    """
    batches = tokens.view(-1, *tokens.shape[-2:])

    def step() -> torch.Tensor:
        losses = []
        for batch in batches:
            with context():
                logits = model(input_ids=batch, use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


class Tensors:
    """The tensors of a workload: weights with random codes, of a kind that zerofp4.empty takes, and masters
    that are views of one flat buffer of normal values, at whatever alignment that gives.
    """

    def __init__(self, workload: Workload, device: torch.device, **kind: Any):
        torch.manual_seed(0)
        self.workload = workload
        self.weights = [zerofp4.empty(shape, device=device, **kind) for shape, _ in workload.pieces]
        for weight in self.weights:
            weight.rowwise_data.random_()
        self.flat = torch.randn(workload.owned, device=device)
        parts = iter(self.flat.split([shard.numel for _, shard in workload.pieces if shard.numel]))
        self.masters = [next(parts) if shard.numel else None for _, shard in workload.pieces]
        self.starts = [shard.start if shard.numel else None for _, shard in workload.pieces]

    def plan(self) -> zerofp4.CastPlan:
        """A plan for a world of one. Elements that nobody owns keep their codes."""
        return zerofp4.CastPlan(self.weights, self.masters, self.starts)
