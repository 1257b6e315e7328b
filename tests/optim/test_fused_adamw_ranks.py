"""An update that adds up what ranks have brought as it reads it: the bytes of a mean that is taken first."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4.ops import (
    AdamWItem,
    AdamWStage,
    MasterPiece,
    PeerRows,
    RankGradients,
    adamw_options,
    average,
)
from zerofp4.shard import Shard

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
TENSORS = [
    ((130, 256), 0, 130 * 256),
    ((64, 130), 1000, 5001),
    (None, 0, 300),
    ((48, 128), 128, 4096),
    (None, 0, 1),
]
"""Matrix, first element and number of elements of each; without a matrix nobody wants its amaxes."""


def places(gap: int) -> tuple[list[int], int]:
    """Where the tensors begin in a slice, `gap` elements behind a vector's alignment, and its length."""
    begins, end = [], 0
    for _, _, numel in TENSORS:
        begins.append(-(-end // 256) * 256 + gap)
        end = begins[-1] + numel
    return begins, -(-end // 256) * 256


def update(masters, begins, gradients, brought, dtype, device):
    """The slice of masters, both moments, the steps and the amaxes after two updates."""
    reduced = torch.zeros(4096, device=device)
    moments = [torch.zeros_like(masters) for _ in range(2)]
    steps = torch.zeros(len(TENSORS), device=device)
    items, word = [], 64
    for i, ((matrix, start, numel), begin) in enumerate(zip(TENSORS, begins, strict=True)):
        own = [flat[begin : begin + numel] for flat in (masters, *moments)]
        pieces = ()
        if matrix is not None:
            pieces = (MasterPiece(own[0], Shard(start, numel), matrix, torch.bfloat16, word, 16 + i),)
            word += -(-matrix[0] // 16) * -(-matrix[1] // 16) + 3 & -4
        items.append(AdamWItem(own[0], steps[i], *own[1:], dtype, pieces))
    stage = AdamWStage(items, reduced)
    for _ in range(2):
        reduced.zero_()
        stage.begin(adamw_options(**OPTIONS), 0, gradients)
        stage.update(brought)
    return [masters, *moments, steps, reduced]


def check(found, expected, what):
    names = ("masters", "exp_avg", "exp_avg_sq", "steps", "amaxes")
    for name, actual, wanted in zip(names, found, expected, strict=True):
        assert_bytes_equal(actual, wanted, f"{what}: {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("gap", [0, 1])
def test_the_bytes_of_the_mean(device, dtype, count, gap):
    begins, length = places(gap)
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, length, generator=generator).to(device, dtype)
    masters = torch.randn(length, generator=generator).to(device)
    mean = torch.empty(length, device=device)
    average(rows, mean)
    means = [mean[b : b + n] for b, (_, _, n) in zip(begins, TENSORS, strict=True)]
    expected = update(masters.clone(), begins, means, None, torch.float32, device)
    for rank in {0, count // 2, count - 1}:
        received = rows.clone()
        own = [received[rank, b : b + n].clone() for b, (_, _, n) in zip(begins, TENSORS, strict=True)]
        received[rank] = math.nan  # a rank's own row is not read
        mine = masters.clone()
        found = update(mine, begins, own, RankGradients(received, mine, rank), dtype, device)
        check(found, expected, f"rank {rank}")
        # Each rank's row in memory of its own, wherever that is.
        apart = [row.clone() for row in rows]
        own = [apart[rank][b : b + n] for b, (_, _, n) in zip(begins, TENSORS, strict=True)]
        peers = PeerRows(tuple(row.data_ptr() for row in apart), length, dtype)
        mine = masters.clone()
        check(
            update(mine, begins, own, RankGradients(peers, mine, rank), dtype, device),
            expected,
            f"rank {rank}, rows of peers",
        )
    assert (expected[-1][16:64] > 0).sum() == 3


def test_tensors_without_a_gradient_are_left_alone(device):
    begins, length = places(0)
    rows = torch.randn(2, length, device=device)
    masters = torch.randn(length, device=device)
    before = masters.clone()
    gradients = [
        None if i % 2 else rows[0, b : b + n]
        for i, (b, (_, _, n)) in enumerate(zip(begins, TENSORS, strict=True))
    ]
    *_, steps, reduced = update(
        masters, begins, gradients, RankGradients(rows, masters, 0), torch.float32, device
    )
    assert steps.tolist() == [2, 0, 2, 0, 2]
    for i in (1, 3):
        own = slice(begins[i], begins[i] + TENSORS[i][2])
        assert_bytes_equal(masters[own], before[own], f"master {i}")
        assert reduced[16 + i] == before[own].bfloat16().abs().max()
