"""The kernels of updates: those of compact state are reference.compact_adamw_step, byte for byte, and those
that add up the gradients of ranks as they read them have the bytes of a mean that is taken first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from distributed.optim.fused_cases import HYPERS, OPTIONS
from helpers import assert_bytes_equal, assert_values_equal
from hypothesis import given
from hypothesis import strategies as st

from zerofp4 import ops, reference
from zerofp4.engine import joined, write_master
from zerofp4.format import STATE_GROUP
from zerofp4.layout import ceil_div
from zerofp4.shard import Shard

# Whole vectors and parts of them, groups, strips and more than one.
COLUMNS = st.one_of(st.sampled_from([64, 65, 127, 128, 144, 192, 256, 272, 320, 528]), st.integers(64, 560))
PLAIN = OPTIONS | {"maximize": False}


def embedded(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A flat view of the values, so many elements behind the beginning of its memory."""
    buffer = torch.empty(offset + values.numel(), dtype=values.dtype, device=values.device)
    return buffer[offset:].copy_(values.reshape(-1))


@dataclasses.dataclass
class Tensor:
    """A shard of a matrix in compact state, and the same in plain tensors."""

    matrix: tuple[int, int]
    start: int
    end: int
    master: torch.Tensor
    """float32 [rows, cols] of the whole matrix, which each step replaces."""
    low: torch.Tensor | None
    high: torch.Tensor
    """What the kernels have of the masters; the float32 ones where there is no low byte."""
    moments: reference.CompactMoments
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: torch.Tensor
    step: torch.Tensor
    number: int

    @classmethod
    def make(cls, master, split, number=0, owned=None, offset=0) -> Tensor:
        """master: float32 [rows, cols]. owned: the first and the last element, both between groups."""
        rows, cols = master.shape
        start, end = owned or (0, rows * cols)
        device, numel = master.device, end - start
        master = reference.round_master(master.cpu(), torch.tensor(0)) if split else master.cpu()
        high, low = (part.to(device).flatten()[start:end] for part in reference.split_master(master))
        plain = master.to(device).flatten()[start:end]
        groups = Tensor.groups_before(end, cols) - Tensor.groups_before(start, cols)
        return cls(
            (rows, cols),
            start,
            end,
            master,
            embedded(low, offset) if split else None,
            embedded(high if split else plain, offset),
            reference.no_moments(rows, cols),
            embedded(torch.zeros(numel, dtype=torch.int8, device=device), offset),
            embedded(torch.zeros(numel, dtype=torch.uint8, device=device), offset),
            torch.zeros(groups, 2, device=device),
            torch.zeros((), device=device),
            number,
        )

    @staticmethod
    def groups_before(position: int, cols: int) -> int:
        row, col = divmod(position, cols)
        return row * ceil_div(cols, STATE_GROUP) + col // STATE_GROUP

    def piece(self, dtype=torch.bfloat16, tile_offset=-1, amax_offset=-1) -> ops.MasterPiece:
        shard = Shard(self.start, self.end - self.start)
        return ops.MasterPiece(self.high, shard, self.matrix, dtype, tile_offset, amax_offset)

    def item(self, gradient_dtype, piece=None) -> ops.AdamWItem:
        state = self.high, self.step, self.exp_avg, self.exp_avg_sq
        pieces = (piece or self.piece(),)
        compact = {"compact": True, "scales": self.scales, "low": self.low, "number": self.number}
        return ops.AdamWItem(*state, gradient_dtype, pieces, **compact)

    def owned(self, whole: torch.Tensor) -> torch.Tensor:
        """What is owned of a tensor of the whole matrix."""
        return whole.reshape(-1)[self.start : self.end]

    def update(self, gradient: torch.Tensor, **options) -> None:
        """Of the reference. gradient: [rows, cols]; what is not owned may be anything."""
        number = None if self.low is None else self.number
        step = int(self.step.item()) + 1
        self.master, self.moments = reference.compact_adamw_step(
            self.master, gradient.cpu(), self.moments, step, number=number, **options
        )

    def stored(self) -> torch.Tensor:
        """The float32 values of what the kernels have of the masters, on the CPU."""
        high = self.high.cpu()
        return high if self.low is None else reference.join_master(high, self.low.cpu())

    def check(self, what: str) -> None:
        assert_values_equal(self.stored(), self.owned(self.master), f"{what}: masters")
        assert_bytes_equal(self.exp_avg.cpu(), self.owned(self.moments.exp_avg), f"{what}: exp_avg")
        assert_bytes_equal(self.exp_avg_sq.cpu(), self.owned(self.moments.exp_avg_sq), f"{what}: exp_avg_sq")
        first = self.groups_before(self.start, self.matrix[1])
        scales = self.moments.scales.view(-1, 2)[first : first + len(self.scales)]
        assert_bytes_equal(self.scales.cpu(), scales, f"{what}: scales")


def compare_step(tensors, gradients, what, reduced=None, pieces=None, offsets=(0,), **hypers):
    """A step of the kernels has the bytes of one of the reference.

    gradients: of each tensor [rows, cols], or None. pieces: of each tensor. offsets: of each tensor, so many
    elements after the beginning of its memory its gradient lies.
    """
    hypers, items, owned = PLAIN | hypers, [], []
    for i, (t, gradient) in enumerate(zip(tensors, gradients, strict=True)):
        items.append(t.item(torch.float32 if gradient is None else gradient.dtype, pieces and pieces[i]))
        owned.append(None if gradient is None else embedded(t.owned(gradient), offsets[i % len(offsets)]))
        if gradient is not None:
            t.update(gradient, **hypers)
    stage = ops.AdamWStage(items, reduced)
    stage.begin(ops.adamw_options(**hypers), 0, owned)
    stage.update(None)
    for i, t in enumerate(tensors):
        t.check(f"{what}: tensor {i}")


@st.composite
def shards(draw):
    """(rows, cols, first and last owned element, 24-bit masters, offsets of master and gradient, bf16)"""
    rows, cols = draw(st.integers(1, 40)), draw(COLUMNS)
    groups = rows * -(-cols // 64)
    first = draw(st.sampled_from([0, draw(st.integers(0, groups - 1))]))
    last = draw(st.sampled_from([groups, draw(st.integers(first + 1, groups))]))
    places = (divmod(group, -(-cols // 64)) for group in (first, last))
    owned = tuple(row * cols + group * 64 for row, group in places)
    offsets = draw(st.sampled_from([0, 0, 16, 5])), draw(st.sampled_from([0, 0, 1, 4, 8, 16]))
    return rows, cols, owned, draw(st.booleans()), offsets, draw(st.booleans())


@pytest.mark.cpu_kernel
@given(specifications=st.lists(shards(), min_size=1, max_size=3), hypers=HYPERS, seed=st.integers(0, 1000))
def test_equals_the_reference(device, specifications, hypers, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for number, (rows, cols, owned, split, (offset, _), _) in enumerate(specifications):
        master = torch.randn(rows, cols, generator=generator).to(device)
        tensors.append(Tensor.make(master, split, number, owned, offset))
    offsets = [offset for *_, (_, offset), _ in specifications]
    for step in range(3):
        gradients = []
        for t, (*_, bf16) in zip(tensors, specifications, strict=True):
            spread = torch.randn(t.matrix, generator=generator).exp()
            values = torch.randn(t.matrix, generator=generator) * spread * 10.0 ** (2 * step - 4)
            gradients.append(values.to(device, torch.bfloat16 if bf16 else torch.float32))
        compare_step(tensors, gradients, f"step {step}", offsets=offsets, **hypers)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_every_length(device, seed):
    """Of up to 600 elements, cut at the borders of groups and of the rows that the CPU takes at a time."""
    generator = torch.Generator().manual_seed(seed)
    lengths = sorted({*range(1, 70), *(64 * i + near for i in range(1, 10) for near in (-1, 0, 1, 16, 23))})
    tensors = [
        Tensor.make(torch.randn(2, cols, generator=generator).to(device), i % 3 > 0, i)
        for i, cols in enumerate(lengths)
    ]
    for step in range(2):
        gradients = [torch.randn(t.matrix, generator=generator).to(device) for t in tensors]
        compare_step(tensors, gradients, f"step {step}")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("split", [False, True])
def test_subnormal_numbers_infinities_and_nan(device, split):
    """In groups of their own, and in groups with others, at every magnitude of scales."""
    special = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-20, 1e-10, 1.0, 1e18, 1e25, 3.4e38, math.inf, math.nan]
    special = torch.tensor(special + [-x for x in special])
    masters, gradients = torch.cartesian_prod(special, special).to(device).unbind(1)
    masters, gradients = (x.repeat_interleave(64).view(-1, 64) for x in (masters, gradients))
    mixed = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(device)
    gradients = torch.cat((gradients, gradients * mixed, gradients.T.reshape(gradients.shape)))
    for maximize, eps in itertools.product((False, True), (1e-8, 1e-45, 0.0)):
        hypers = OPTIONS | {"eps": eps, "maximize": maximize}
        tensor = Tensor.make(masters.repeat(3, 1), split, number=2**32 - 1)
        for step in range(3):
            what = f"maximize {maximize}, eps {eps}, step {step}"
            compare_step([tensor], [gradients.roll(7 * step, 0)], what, **hypers)


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("exponent", range(-145, 121, 19))
def test_scales_of_every_magnitude(device, exponent):
    """A state that has decayed for a long time, or has had gradients beyond any."""
    generator = torch.Generator().manual_seed(exponent + 200)
    tensor = Tensor.make(torch.zeros(20, 256, device=device), True)
    for step in range(4):
        values, spread = (torch.randn(20, 256, generator=generator) for _ in range(2))
        gradient = torch.ldexp(values * spread.exp(), torch.tensor(exponent if step < 2 else -300)).to(device)
        compare_step([tensor], [gradient], f"2^{exponent}, step {step}")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("low", [0, 1, 127, 128, 129, 255])
def test_masters_of_every_bfloat16(device, low):
    """With bytes that do not belong to them too: of zero, of Inf, and half of a step, which is not stored."""
    generator = torch.Generator().manual_seed(low)
    tensor = Tensor.make(torch.randn(512, 128, generator=generator).to(device), True)
    for step in range(2):
        gradient = torch.randn(512, 128, generator=generator).to(device, torch.bfloat16)
        if step == 1:
            high = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
            tensor.high.copy_(high[torch.randperm(2**16, generator=generator)])
            tensor.low.fill_(low)
            master = reference.join_master(tensor.high.cpu(), tensor.low.cpu())
            tensor.master = master.view(tensor.matrix)
        compare_step([tensor], [gradient], f"step {step}")


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("scales", [(1e-3, 1e-2), (1e-12, 1e-9), (3.0, 1e-15), (1e30, 1e19), (0.0, 1e-3)])
@pytest.mark.parametrize("bf16", [False, True])
def test_codes_of_every_pair(device, scales, bf16):
    """Of a first and a second moment, with gradients that change either of them or neither."""
    generator = torch.Generator().manual_seed(0)
    tensor = Tensor.make(torch.randn(512, 128, generator=generator).to(device), True)
    pairs = torch.randperm(2**16, generator=generator).view(512, 128)
    exp_avg, exp_avg_sq = (codes.to(torch.uint8) for codes in (pairs >> 8, pairs & 0xFF))
    every = torch.tensor(scales).expand(512, 2, 2).contiguous()
    tensor.moments = reference.CompactMoments(exp_avg.view(torch.int8), exp_avg_sq, every)
    for mine, moment in zip((tensor.exp_avg, tensor.exp_avg_sq, tensor.scales), tensor.moments, strict=True):
        mine.copy_(moment.view(mine.shape))
    magnitude = torch.logspace(-8, 2, 512).view(512, 1) * scales[0]
    gradient = (torch.randn(512, 128, generator=generator) * magnitude).to(device)
    gradient = gradient.bfloat16() if bf16 else gradient
    compare_step([tensor], [gradient], f"scales {scales}")


def test_rows_that_kernels_cannot_count():
    """Refused before anything is allocated, here of a tensor without memory."""
    master = torch.empty(1, 2**31, device="meta")
    item = ops.AdamWItem(master, None, None, None, torch.float32, compact=True)
    with pytest.raises(ValueError, match=r"compact state of a matrix \[1, 2147483648\]: .* most 2147483391"):
        ops.AdamWStage([item], None)


@pytest.mark.threads
def test_large_matrices_on_many_threads(device):
    generator = torch.Generator().manual_seed(1)
    tensors = [
        Tensor.make(torch.randn(shape, generator=generator).to(device), split, i)
        for i, (shape, split) in enumerate([((300, 1024), True), ((80, 2872), False), ((700, 130), True)])
    ]
    for step in range(2):
        gradients = [torch.randn(t.matrix, generator=generator).to(device, torch.bfloat16) for t in tensors]
        compare_step(tensors, gradients, f"step {step}")


# Amaxes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-45, 65519.0, 3.4e38, math.inf, math.nan])
def test_amaxes_left_behind(device, value, split, dtype):
    """Of masters as they are stored, of whole strips and of parts, with gradients and without."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        ((48, 256), None),
        ((40, 200), (64, 7 * 200 + 128)),
        ((3, 72), None),
        ((16, 128), (1024, 1920)),
    ]
    masters = [torch.randn(shape, generator=generator) for shape, _ in shapes]
    masters[3].view(-1)[1900] = value
    tensors = [
        Tensor.make(master.to(device), split, i, owned)
        for i, (master, (_, owned)) in enumerate(zip(masters, shapes, strict=True))
    ]
    reduced, pieces, word = torch.zeros(4096, device=device), [], 64
    for i, t in enumerate(tensors):
        pieces.append(t.piece(dtype, word, 16 + i))
        word += -(-t.matrix[0] // 16) * -(-t.matrix[1] // 16)
    for step in range(3):
        reduced.zero_()
        gradients = [torch.randn(t.matrix, generator=generator).to(device) for t in tensors]
        if step != 1:
            gradients[1] = gradients[3] = None
        compare_step(tensors, gradients, f"step {step}", reduced, pieces)
        for i, (t, piece) in enumerate(zip(tensors, pieces, strict=True)):
            tiles, amax = reference.partial_amax(t.stored(), t.start, torch.Size(t.matrix), dtype)
            found = reduced[piece.tile_offset :][: tiles.numel()].view(tiles.shape)
            assert_bytes_equal(found.cpu(), tiles, f"step {step}: tiles of {i}")
            assert_bytes_equal(reduced[16 + i].cpu().view(1), amax, f"step {step}: amax of {i}")


# The mean of ranks

TENSORS = [
    ((130, 256), 0, 130 * 256),
    ((64, 130), 1040, 5004),
    (None, 0, 300),
    ((48, 128), 128, 4096),
    (None, 0, 1),
]
"""Matrix, first element and number of elements of each; without a matrix it has no amaxes and full state."""


def layout(tensors: list, gap: int) -> tuple[list[slice], int]:
    """Where the tensors lie in a slice, `gap` elements after a vector's alignment, and its length."""
    found, end = [], 0
    for _, _, numel in tensors:
        begin = -(-end // 256) * 256 + gap
        end = begin + numel
        found.append(slice(begin, end))
    return found, -(-end // 256) * 256


def update(state, tensors, masters, spans, gradients, brought, dtype):
    """By name what two updates make of a slice of masters. masters: replaced by those."""
    steps, numel = torch.zeros(len(tensors), device=masters.device), masters.numel()
    found = {"masters": masters, "steps": steps, "amaxes": torch.zeros(4096, device=masters.device)}
    kinds = (torch.float32,) * 2 if state == "full" else (torch.int8, torch.uint8)
    for name, kind in zip(("exp_avg", "exp_avg_sq"), kinds, strict=True):
        found[name] = torch.zeros(numel, dtype=kind, device=masters.device)
    if state == "24 bits":
        found["low"] = torch.zeros(numel, dtype=torch.uint8, device=masters.device)
    items, word = [], 64
    for i, ((matrix, start, count), span) in enumerate(zip(tensors, spans, strict=True)):
        pieces, options = (), {}
        if matrix is not None:
            owned = Shard(start, count), matrix, torch.bfloat16
            pieces = (ops.MasterPiece(masters[span], *owned, word, 16 + i),)
            word += -(-matrix[0] // 16) * -(-matrix[1] // 16) + 3 & -4
        if state != "full":
            low = found["low"][span] if "low" in found else None
            first, last = (Tensor.groups_before(end, matrix[1]) for end in (start, start + count))
            found[f"scales {i}"] = scales = torch.zeros(last - first, 2, device=masters.device)
            options = {"compact": True, "scales": scales, "low": low, "number": i}
        moments = found["exp_avg"][span], found["exp_avg_sq"][span]
        items.append(ops.AdamWItem(masters[span], steps[i], *moments, dtype, pieces, **options))
    stage = ops.AdamWStage(items, found["amaxes"])
    for _ in range(2):
        found["amaxes"].zero_()
        stage.begin(ops.adamw_options(**OPTIONS, maximize=False), 0, gradients)
        stage.update(brought)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("state", ["full", "compact", "24 bits"])
def test_the_bytes_of_the_mean(device, state, gap, count, dtype):
    """Of rows in one buffer, and of each rank's row in memory of its own, wherever that is. Tensors without a
    gradient are left alone.
    """
    tensors = TENSORS if state == "full" else [tensor for tensor in TENSORS if tensor[0] is not None]
    spans, length = layout(tensors, gap)
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, length, generator=generator).to(device, dtype)
    masters = torch.randn(length, generator=generator).to(device)
    masters = masters.bfloat16() if state == "24 bits" else masters
    mean = torch.empty(length, device=device)
    ops.average(rows, mean)
    gradients = [None if i == 1 else mean[span] for i, span in enumerate(spans)]
    expected = update(state, tensors, masters.clone(), spans, gradients, None, torch.float32)
    assert expected["steps"].tolist() == [0 if i == 1 else 2 for i in range(len(tensors))]
    assert_bytes_equal(expected["masters"][spans[1]], masters[spans[1]], "the master without gradient")
    assert expected["amaxes"][17] == masters[spans[1]].bfloat16().abs().max()
    assert (expected["amaxes"][16:64] > 0).sum() == 3
    apart = [row.clone() for row in rows]
    peers = ops.PeerRows(tuple(row.data_ptr() for row in apart), length, dtype)
    for rank in {0, count // 2, count - 1}:
        received = rows.clone()
        received[rank] = math.nan  # a rank's own row is not read
        own = [None if i == 1 else apart[rank][span] for i, span in enumerate(spans)]
        for brought in (received, peers):
            mine = masters.clone()
            gradients = ops.RankGradients(brought, mine, rank)
            found = update(state, tensors, mine, spans, own, gradients, dtype)
            for name, wanted in expected.items():
                assert_bytes_equal(found[name], wanted, f"rank {rank}, {type(brought).__name__}: {name}")


@pytest.mark.parametrize("count", [3, 4])
def test_the_sign_of_a_mean_of_minus_zero(device, count):
    """It decides about the sign of a moment of zero, and that about the sign of a master of zero. The first
    16 rows of 128 are read as vectors.
    """
    rows = torch.full((count, 2348), -0.0, device=device)

    def updated(gradient, brought=None):
        master, exp_avg, exp_avg_sq = (torch.full_like(rows[0], zero) for zero in (-0.0, -0.0, 0.0))
        step = torch.zeros((), device=device)
        stage = ops.AdamWStage([ops.AdamWItem(master, step, exp_avg, exp_avg_sq, rows.dtype, ())], None)
        stage.begin(ops.adamw_options(**OPTIONS | {"betas": (0.3, 0.9)}, maximize=False), 0, [gradient])
        stage.update(None if brought is None else ops.RankGradients(brought, master, 1))
        return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    expected = updated(rows[0])
    assert torch.signbit(expected["exp_avg"]).all()
    assert not torch.signbit(expected["master"]).any()
    peers = ops.PeerRows(tuple(row.data_ptr() for row in rows), rows.shape[1], rows.dtype)
    for brought in (rows, peers):
        for name, found in updated(rows[1], brought).items():
            assert_bytes_equal(found, expected[name], f"{type(brought).__name__}: {name}")


# Masters of 24 bits in plain torch, as kernels write and read them


def bits(*given) -> torch.Tensor:
    return torch.from_numpy(np.array(given, np.uint32).view(np.float32))


DRAWN = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32))
SPECIAL = bits(0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 1)
HALFWAY = bits(*(0x3F807F00 + i for i in range(512)), *(0xBF807F00 + i for i in range(512)))
"""Around the middle between two bfloat16 values."""


@pytest.mark.parametrize("are_on_host", [False, True])
@pytest.mark.parametrize("values", [DRAWN, SPECIAL, HALFWAY], ids=["drawn", "special", "halfway"])
def test_masters_are_rounded_and_joined_as_specified(device, values, are_on_host):
    """are_on_host: the masters of values that are on the device."""
    home, given = ("cpu", values.to(device)) if are_on_host else (device, values)
    high = torch.empty(values.shape, dtype=torch.bfloat16, device=home)
    low = torch.empty(values.shape, dtype=torch.uint8, device=home)
    write_master(given, high, low)
    rounded = reference.round_master(values, torch.tensor(128))
    planes = reference.split_master(rounded)
    assert_bytes_equal(high.cpu(), planes[0], "bfloat16")
    assert_bytes_equal(low.cpu(), planes[1], "bytes")
    assert_bytes_equal(joined(high, low).cpu(), reference.join_master(*planes), "joined")
