"""Weights, masters, ways to shard them and to cast them that distributed tests share."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases.optim import assert_all_equal
from helpers import assert_bytes_equal

import zerofp4
from zerofp4 import reference
from zerofp4.cast import CastPlan
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.shard import Shard

# A weight of one tile, ragged edges, K not a multiple of 16 or 64, one row pair wide as a strip.
SHAPES = [(2, 2), (16, 16), (34, 288), (130, 66), (2, 1000), (64, 128)]
ODD_SHAPES = [(1, 2), (3, 16), (33, 50), (7, 1000), (65, 128), (131, 66)]
"""Of weights that have rows only."""

EXPERTS = [(3, 18, 50), (16, 48), (1, 2, 2), (3, 2, 1000), (5, 16, 16), (2, 34, 18)]
"""Stacks of ragged matrices, a plain one among them."""

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

WIRES = {"bfloat16": DTYPES[:1], "float32": DTYPES}
"""The dtypes of weights by the dtype in which the amaxes of their plan travel."""

TILES, ROWS = (16, 16), (1, 16)
"""Scaling blocks."""

SPLITS = ("even", "odd", "last", "flat", "tile")


def split(numel: int, world_size: int, how: str, seed: int) -> list[Shard]:
    """Disjoint shards of [0, numel), in rank order.

    even: equal byte-aligned pieces; odd: boundaries at odd elements; last: one rank owns everything; tile:
    all boundaries inside the first tile row; flat: random, also empty, in shuffled rank order.
    """
    rng = random.Random(seed)
    if how == "last":
        return [Shard(0, 0)] * (world_size - 1) + [Shard(0, numel)]
    if how == "even":
        bounds = [min(numel, rank * (-(-numel // (2 * world_size)) * 2)) for rank in range(world_size)]
    elif how == "odd":
        bounds = [0, *(min(numel, rank * numel // world_size | 1) for rank in range(1, world_size))]
    elif how == "tile":
        bounds = [0, *(min(numel, 3 * rank) for rank in range(1, world_size))]
    else:
        bounds = [0, *sorted(rng.randrange(numel + 1) for _ in range(world_size - 1))]
    ends = [*bounds[1:], numel]
    shards = [Shard(a, b - a) if b > a else Shard(0, 0) for a, b in zip(bounds, ends, strict=True)]
    if how == "flat":
        rng.shuffle(shards)
    return shards


def whole_blocks(shards: list[Shard], record) -> list[Shard]:
    """Shards with the boundaries moved down to those of blocks, or rows of tiles."""
    rows, cols = record.matrix

    def moved(element: int) -> int:
        row, col = divmod(element, cols)
        if record.block == ROWS:
            return row * cols + col // 16 * 16
        return (row // rows * rows + row % rows // 16 * 16) * cols

    ends = [(moved(shard.start), moved(shard.end)) for shard in shards]
    return [Shard(a, b - a) if b > a else Shard(0, 0) for a, b in ends]


class Model:
    """Shapes in dtypes and blocks by turns, the whole masters (equal on all ranks) and this rank's shards of
    them. Ranks keep different sides and layouts, since these never travel.
    """

    def __init__(
        self,
        world,
        how: str,
        *,
        shapes=SHAPES,
        seed: int = 0,
        dtypes=DTYPES,
        blocks=(TILES,),
        choices=(None,),
    ):
        """choices: four over six, by turns; shards then have whole blocks, whatever `how` cuts."""
        self.rank = world.rank
        self.weights, self.whole, self.shards, self.masters = [], [], [], []
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(shapes):
            layouts = SCALE_LAYOUTS if (i + self.rank) % 2 else ("compact",)
            block = blocks[i % len(blocks)]
            columnwise = block == TILES and (i + self.rank) % 3 > 0
            choice = choices[i % len(choices)]
            options = {"block": block, "columnwise": columnwise, "scale_layouts": layouts}
            options["four_over_six"] = choice
            weight = zerofp4.empty(shape, dtype=dtypes[i % len(dtypes)], device=world.device, **options)
            for _, buffer in weight.record.buffers():
                buffer.view(torch.uint8).fill_(0xA5)
            whole = torch.randn(shape, generator=generator) * 10.0 ** (i - 2)
            self.weights.append(weight)
            self.whole.append(whole.to(world.device))
            shards = split(whole.numel(), world.world_size, how, seed + i)
            self.shards.append(shards if choice is None else whole_blocks(shards, weight.record))
        self.cut()

    def own(self) -> list[tuple[torch.Tensor, Shard]]:
        """By weight, the elements of this rank, and where they lie."""
        own = [of_weight[self.rank] for of_weight in self.shards]
        return [(w.flatten()[s.start : s.end], s) for w, s in zip(self.whole, own, strict=True)]

    def cut(self) -> None:
        """Fresh master shards from the whole masters."""
        self.masters = [values.clone() if shard.numel else None for values, shard in self.own()]

    def change(self) -> None:
        """Other values in the same masters."""
        self.whole = [whole.sin() * 100 for whole in self.whole]
        for master, (values, _) in zip(self.masters, self.own(), strict=True):
            if master is not None:
                master.copy_(values)

    def move(self, i: int = 2) -> None:
        """Codes that a gather would change, and on rank 1 those of a weight in other storage."""
        for weight in self.weights:
            weight.rowwise_data.fill_(0x10 + self.rank)
        if self.rank == 1:
            self.weights[i].rowwise_data = self.weights[i].rowwise_data.clone()

    @property
    def starts(self) -> list[int | None]:
        return [shard.start if shard.numel else None for _, shard in self.own()]

    @property
    def numels(self) -> list[int]:
        return [shard.numel for _, shard in self.own()]

    def plan(self, **options) -> zerofp4.CastPlan:
        return zerofp4.CastPlan(self.weights, self.masters, self.starts, **options)

    def cast(self, **options) -> None:
        zerofp4.cast_master_weights_to_nvfp4(self.weights, self.masters, self.starts, **options)

    def gather(self, **options) -> None:
        zerofp4.all_gather_nvfp4(self.weights, self.starts, self.numels, **options)

    @property
    def plans(self) -> list[CastPlan]:
        """Those that cast() has kept."""
        return [kept.plan for kept in self.weights[0].record.attachments["cast_plans"].values()]

    def check(self, groups: list[list[int]] | None = None, skip: tuple[int, ...] = ()) -> None:
        """Every buffer of every weight equals quantizing its whole master, with the amax of its group."""
        rounded = [w.to(t.dtype) for w, t in zip(self.whole, self.weights, strict=True)]
        amaxes = [reference.magnitude(values).amax((-2, -1)).view(-1) for values in rounded]
        for group in groups or []:
            largest = torch.stack([amaxes[i] for i in group]).amax(0)
            amaxes = [largest if i in group else amax for i, amax in enumerate(amaxes)]
        for i, (weight, values, amax) in enumerate(zip(self.weights, rounded, amaxes, strict=True)):
            if i in skip:
                continue
            choice = {"four_over_six": weight.four_over_six}
            if values.dim() == 2:
                codes = reference.quantize(values, weight.block[0], amax, **choice).rowwise_data
            else:
                codes = reference.quantize_experts(values, amax, **choice).rowwise_data
            assert_bytes_equal(weight.rowwise_data, codes, f"weight {i}: codes")
            options = {"columnwise": weight.columnwise_data is not None, "scale_layouts": SCALE_LAYOUTS}
            expected = zerofp4.quantize(values, block=weight.block, amax=amax, **options, **choice).record
            for name, buffer in weight.record.buffers():
                assert_bytes_equal(buffer, expected.buffer(name), f"weight {i}: {name}")

    @contextlib.contextmanager
    def refused(self, match: str, mine: str | None = None, error: type = RuntimeError):
        """Around calls that change no weight and raise RuntimeError, or on rank 1 `error` with `mine`."""
        error, match = (error, mine or match) if self.rank == 1 else (RuntimeError, match)
        before = self.snapshot()
        with pytest.raises(error, match=match):
            yield
        self.check_untouched(before)

    def snapshot(self) -> list[torch.Tensor]:
        return [b.view(torch.uint8).clone() for w in self.weights for _, b in w.record.buffers()]

    def check_untouched(self, snapshot: list[torch.Tensor]) -> None:
        assert_all_equal(self.snapshot(), snapshot, "a weight that must not change")


def is_last(world) -> bool:
    return world.rank == world.world_size - 1


def shared_folder(world) -> Path:
    """The same on every rank, and gone when the ranks are."""
    found = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return Path(found[0])


def finish(plan: zerofp4.CastPlan) -> None:
    """A step, gathered and completed."""
    plan.step()
    plan.all_gather()
    plan.post()


def cast_and_gather(model: Model, **options) -> None:
    """The same by the functions. model: anything with weights, masters, starts and numels."""
    zerofp4.cast_master_weights_to_nvfp4(model.weights, model.masters, model.starts, **options)
    zerofp4.all_gather_nvfp4(model.weights, model.starts, model.numels)
    zerofp4.post_all_gather_processing(model.weights)


def raised_by(call: Callable) -> BaseException | None:
    """What it raises, without its frames, which hold what they refer to."""
    try:
        call()
    except BaseException as error:
        bare: BaseException | None = error
        while bare is not None:
            bare.__traceback__, bare = None, bare.__cause__ or bare.__context__
        return error
    return None


def no_space(*_, **__) -> None:
    raise OSError("No space left on device")


def raised_everywhere(world, error: type, function, *args, **kwargs) -> str:
    """Asserts that every rank raises `error`, and with the same message; returns it."""
    raised = raised_by(lambda: function(*args, **kwargs))
    assert isinstance(raised, error), repr(raised)
    messages: list = [None] * world.world_size
    dist.all_gather_object(messages, str(raised))
    assert len(set(messages)) == 1, messages
    return messages[0]
