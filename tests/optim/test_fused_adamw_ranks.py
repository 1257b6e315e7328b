"""An update that adds up what ranks have brought as it reads it: the bytes of a mean that is taken first."""

from __future__ import annotations

import math

import pytest
import torch
from distributed.optim.fused_cases import OPTIONS
from helpers import assert_bytes_equal

from zerofp4 import ops
from zerofp4.shard import Shard

TENSORS = [
    ((130, 256), 0, 130 * 256),
    ((64, 130), 1000, 5001),
    (None, 0, 300),
    ((48, 128), 128, 4096),
    (None, 0, 1),
]
"""Matrix, first element and number of elements of each; without a matrix nobody wants its amaxes."""


def layout(gap: int) -> tuple[list[slice], int]:
    """Where the tensors lie in a slice, `gap` elements behind a vector's alignment, and its length."""
    found, end = [], 0
    for _, _, numel in TENSORS:
        begin = -(-end // 256) * 256 + gap
        end = begin + numel
        found.append(slice(begin, end))
    return found, -(-end // 256) * 256


def update(masters, spans, gradients, brought, dtype):
    """By name what two updates make of a slice of masters."""
    reduced, steps = (torch.zeros(n, device=masters.device) for n in (4096, len(TENSORS)))
    moments = [torch.zeros_like(masters) for _ in range(2)]
    items, word = [], 64
    for i, ((matrix, start, numel), span) in enumerate(zip(TENSORS, spans, strict=True)):
        pieces = ()
        if matrix is not None:
            owned = Shard(start, numel), matrix, torch.bfloat16
            pieces = (ops.MasterPiece(masters[span], *owned, word, 16 + i),)
            word += -(-matrix[0] // 16) * -(-matrix[1] // 16) + 3 & -4
        items.append(ops.AdamWItem(masters[span], steps[i], *(m[span] for m in moments), dtype, pieces))
    stage = ops.AdamWStage(items, reduced)
    for _ in range(2):
        reduced.zero_()
        stage.begin(ops.adamw_options(**OPTIONS, maximize=False), 0, gradients)
        stage.update(brought)
    names = ("masters", "exp_avg", "exp_avg_sq", "steps", "amaxes")
    return dict(zip(names, (masters, *moments, steps, reduced), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("gap", [0, 1])
def test_the_bytes_of_the_mean(device, dtype, count, gap):
    """Of rows in one buffer, and of each rank's row in memory of its own, wherever that is. Tensors without a
    gradient are left alone.
    """
    spans, length = layout(gap)
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, length, generator=generator).to(device, dtype)
    masters = torch.randn(length, generator=generator).to(device)
    mean = torch.empty(length, device=device)
    ops.average(rows, mean)
    gradients = [None if i == 1 else mean[span] for i, span in enumerate(spans)]
    expected = update(masters.clone(), spans, gradients, None, torch.float32)
    assert expected["steps"].tolist() == [2, 0, 2, 2, 2]
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
            found = update(mine, spans, own, ops.RankGradients(brought, mine, rank), dtype)
            for name, wanted in expected.items():
                assert_bytes_equal(found[name], wanted, f"rank {rank}, {type(brought).__name__}: {name}")
