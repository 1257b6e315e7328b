"""Checkpoints of weights in blocks of 1x16 and with four over six, which other kinds of weights load."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp
from cases.optim import assert_all_equal

from distributed.run import on_ranks
from distributed.state import cases
from distributed.state.cases import KINDS, trained
from zerofp4.testing import verify_model


@on_ranks(2)
@pytest.mark.parametrize(
    ("saved", "loaded"), [("fused", "rows"), ("rows, four over six", "tiles, four over six")]
)
def test_another_kind_follows_the_masters_that_are_loaded(world, saved, loaded):
    _, optimizer = trained(world, 2, saved)
    path = cases.saved(world, optimizer)
    other, resumed = trained(world, 0, loaded, seed=1)
    dcp.load({"optimizer": resumed}, checkpoint_id=path)
    expected, masters = optimizer.gathered_masters(), resumed.gathered_masters()
    assert_all_equal([m for m in masters if m is not None], [m for m in expected if m is not None], "master")
    assert other.first.weight.block == KINDS[loaded].get("block", (16, 16))
    verify_model(other, resumed)
