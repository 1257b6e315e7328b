"""Updates of compact state are reference.compact_adamw_step, byte for byte: masters, codes and scales."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from distributed.optim.compact_cases import Tensor, embedded
from distributed.optim.fused_cases import HYPERS, OPTIONS
from helpers import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st

from zerofp4 import ops, reference

# Whole vectors and parts of them, groups, strips and more than one.
COLUMNS = st.one_of(st.sampled_from([64, 65, 127, 128, 144, 192, 256, 272, 320, 528]), st.integers(64, 560))
PLAIN = OPTIONS | {"maximize": False}


def run(tensors, gradients, options, reduced=None, pieces=None, brought=None, offset=0):
    """One step of the kernels. gradients: of each tensor [rows, cols], or None. offset: so many elements
    behind the beginning of its memory lies each of them.
    """
    dtypes = [torch.float32 if gradient is None else gradient.dtype for gradient in gradients]
    items = [
        t.item(dtype, piece)
        for t, dtype, piece in zip(tensors, dtypes, pieces or [None] * len(tensors), strict=True)
    ]
    stage = ops.AdamWStage(items, reduced)
    pairs = zip(tensors, gradients, strict=True)
    owned = [g if g is None else embedded(t.owned(g), offset) for t, g in pairs]
    stage.begin(options, 0, owned)
    stage.update(brought)


def compare_step(tensors, gradients, what, **hypers):
    """A step of the kernels has the bytes of one of the reference."""
    for t, gradient in zip(tensors, gradients, strict=True):
        t.update(gradient, **hypers)
    run(tensors, gradients, ops.adamw_options(**hypers))
    for i, t in enumerate(tensors):
        t.check(f"{what}: tensor {i}")


@st.composite
def shards(draw):
    """(rows, cols, first and last owned group, 24-bit masters, elements of misalignment, bf16 gradient)"""
    rows, cols = draw(st.integers(1, 40)), draw(COLUMNS)
    groups = rows * -(-cols // 64)
    first = draw(st.sampled_from([0, draw(st.integers(0, groups - 1))]))
    last = draw(st.sampled_from([groups, draw(st.integers(first + 1, groups))]))
    split, offset, bf16 = draw(st.booleans()), draw(st.sampled_from([0, 0, 16, 5])), draw(st.booleans())
    return rows, cols, first, last, split, offset, bf16


def position_of(group: int, cols: int) -> int:
    row, group = divmod(group, -(-cols // 64))
    return row * cols + group * 64


@given(specifications=st.lists(shards(), min_size=1, max_size=3), hypers=HYPERS, seed=st.integers(0, 1000))
def test_equals_the_reference(device, specifications, hypers, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for number, (rows, cols, first, last, split, offset, _) in enumerate(specifications):
        master = torch.randn(rows, cols, generator=generator).to(device)
        owned = position_of(first, cols), position_of(last, cols)
        tensors.append(Tensor.make(master, split, number, owned, offset))
    for step in range(3):
        gradients = []
        for t, (*_, bf16) in zip(tensors, specifications, strict=True):
            spread = torch.randn(t.matrix, generator=generator).exp()
            values = torch.randn(t.matrix, generator=generator) * spread * 10.0 ** (2 * step - 4)
            gradients.append(values.to(device, torch.bfloat16 if bf16 else torch.float32))
        compare_step(tensors, gradients, f"step {step}", **hypers)


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


@pytest.mark.parametrize("exponent", range(-145, 121, 19))
def test_scales_of_every_magnitude(device, exponent):
    """A state that has decayed for a long time, or has had gradients beyond any."""
    generator = torch.Generator().manual_seed(exponent + 200)
    tensor = Tensor.make(torch.zeros(20, 256, device=device), True)
    for step in range(4):
        values, spread = (torch.randn(20, 256, generator=generator) for _ in range(2))
        gradient = torch.ldexp(values * spread.exp(), torch.tensor(exponent if step < 2 else -300)).to(device)
        compare_step([tensor], [gradient], f"2^{exponent}, step {step}", **PLAIN)


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
        compare_step([tensor], [gradient], f"step {step}", **PLAIN)


@pytest.mark.parametrize("lr", [1e-5, -1e-5, 3e-5])
def test_the_mean_of_masters_over_all_random_bytes(device, lr):
    """Is the exact one, also across the middle between two bfloat16 values, toward zero and away from it."""
    parts = torch.tensor([0, 1 << 31]), torch.arange(0x3F7D, 0x3F83) << 16, torch.arange(0x7C, 0x85) << 8
    bits = torch.cartesian_prod(*parts).sum(1)
    masters = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)
    tensor = Tensor.make(masters[:, None].expand(-1, 4096).to(device), True, number=3)
    hypers = PLAIN | {"lr": lr, "weight_decay": 1.0}
    gradient = torch.zeros(tensor.matrix)
    exact, _ = reference.compact_adamw_step(tensor.master, gradient, tensor.moments, 1, number=None, **hypers)
    compare_step([tensor], [gradient.to(device)], f"lr {lr}", **hypers)
    # All elements of a row that have a random byte in common are equal: one for each.
    random = reference.master_bytes(*tensor.matrix, number=3, step=1).long()
    stored = torch.full((len(bits), 256), math.nan).scatter_(1, random, tensor.stored().view(tensor.matrix))
    error = stored.double().mean(1) - exact[:, 0].double()
    step = 2.0 ** (exact[:, 0].double().frexp().exponent - 16.0)
    assert (error.abs() <= step / 128).all()
    assert not (tensor.low == 0x80).any()


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
    compare_step([tensor], [gradient], f"scales {scales}", **PLAIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [1, 4, 8, 16])
def test_gradients_at_any_alignment(device, offset, dtype):
    """Half a vector and one vector, too: a lane's elements are two or four of them."""
    generator = torch.Generator().manual_seed(offset)
    tensors = [Tensor.make(torch.randn(40, 320, generator=generator).to(device), split) for split in (0, 1)]
    gradients = [torch.randn(t.matrix, generator=generator).to(device, dtype) for t in tensors]
    for t, gradient in zip(tensors, gradients, strict=True):
        t.update(gradient, **PLAIN)
    run(tensors, gradients, ops.adamw_options(**PLAIN), offset=offset)
    for t in tensors:
        t.check(f"offset {offset}")


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
        compare_step(tensors, gradients, f"step {step}", **PLAIN)


# Amaxes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("split", [False, True])
def test_amaxes_left_behind(device, split, dtype):
    """Of masters as they are stored, of whole strips and of parts, with gradients and without."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        ((48, 256), None),
        ((40, 200), (64, 7 * 200 + 128)),
        ((3, 72), None),
        ((16, 128), (1024, 1920)),
    ]
    tensors = [
        Tensor.make(torch.randn(shape, generator=generator).to(device), split, i, owned)
        for i, (shape, owned) in enumerate(shapes)
    ]
    reduced, pieces, word = torch.zeros(4096, device=device), [], 64
    for i, t in enumerate(tensors):
        pieces.append(t.piece(dtype, word, 16 + i))
        word += -(-t.matrix[0] // 16) * -(-t.matrix[1] // 16)
    for step in range(3):
        reduced.zero_()
        gradients = [torch.randn(t.matrix, generator=generator).to(device) for t in tensors]
        if step == 1:
            gradients[1] = gradients[3] = None
        for t, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None:
                t.update(gradient, **PLAIN)
        run(tensors, gradients, ops.adamw_options(**PLAIN), reduced, pieces)
        for i, (t, piece) in enumerate(zip(tensors, pieces, strict=True)):
            owned = t.owned(t.master)
            tiles, amax = reference.partial_amax(owned, t.start, torch.Size(t.matrix), dtype)
            found = reduced[piece.tile_offset :][: tiles.numel()].view(tiles.shape)
            assert_bytes_equal(found.cpu(), tiles, f"step {step}: tiles of {i}")
            assert_bytes_equal(reduced[16 + i].cpu().view(1), amax, f"step {step}: amax of {i}")


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.4e38, 65519.0, 1e-45, 0.0])
def test_amaxes_of_values_at_the_edges(device, value):
    master = torch.zeros(32, 160)
    master[17, 155] = value
    for split in (False, True):
        tensor = Tensor.make(master.to(device), split)
        options = ops.adamw_options(lr=0.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, maximize=False)
        for gradient in (None, torch.zeros(32, 160, device=device)):
            reduced = torch.zeros(64, device=device)
            run([tensor], [gradient], options, reduced, [tensor.piece(torch.float32, 16, 8)])
            tiles, _ = reference.partial_amax(tensor.stored(), 0, torch.Size((32, 160)), torch.float32)
            assert_bytes_equal(reduced[16:36].cpu().view(2, 10), tiles, f"split {split}")


# Flags and ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("split", [False, True])
def test_the_mean_of_ranks(device, split, count, dtype):
    """Of rows in one buffer, and of each rank's row in memory of its own: the bytes of a mean taken first."""
    generator = torch.Generator().manual_seed(count)
    shapes, begins, length = [(20, 256), (9, 130), (16, 128)], [0, 5120, 6304], 8352
    rows = torch.randn(count, length, generator=generator).to(device, dtype)
    mean = torch.empty(length, device=device)
    ops.average(rows, mean)
    masters = torch.randn(length, generator=generator)
    high, low = reference.split_master(reference.round_master(masters, torch.tensor(0)))
    apart = [row.clone() for row in rows]
    peers = ops.PeerRows(tuple(row.data_ptr() for row in apart), length, dtype)
    for maximize, rank in itertools.product((False, True), {0, count - 1}):
        received = rows.clone()
        received[rank] = math.nan  # a rank's own row is not read
        for brought in (received, peers):
            memory = (high if split else masters).to(device, copy=True)
            tensors = []
            for i, (shape, begin) in enumerate(zip(shapes, begins, strict=True)):
                span = slice(begin, begin + math.prod(shape))
                tensors.append(Tensor.make(masters[span].view(shape).to(device), split, i))
                tensors[-1].high = memory[span]
                if split:
                    tensors[-1].low = low[span].to(device, copy=True)
                tensors[-1].update(mean[span].view(shape), **OPTIONS, maximize=maximize)
            own = [
                apart[rank][begin : begin + math.prod(shape)].view(shape)
                for shape, begin in zip(shapes, begins, strict=True)
            ]
            gradients = ops.RankGradients(brought, memory, rank)
            run(tensors, own, ops.adamw_options(**OPTIONS, maximize=maximize), brought=gradients)
            for i, t in enumerate(tensors):
                t.check(f"rank {rank}, {type(brought).__name__}: tensor {i}")
