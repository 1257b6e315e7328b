"""Gradients that ranks write into each other's memory in backward passes, here of files on the CPU; with that
of GPUs the same checks run in test_peers.
"""

import pytest
import torch

from distributed.engine import overlap_checks as checks
from distributed.engine.file_peers import sharing_files
from distributed.engine.overlap_cases import SMALL, TINY, loss_of, make
from distributed.optim.cases import check_weights
from distributed.run import on_ranks

FEW = 0.01
"""bucket_mb for some of several parameters."""
ROUNDED = {"gradient_wire": torch.float16}
NARROWED = {"gradient_dtype": torch.float32, "gradient_wire": torch.bfloat16}


def run(world, check, late, **options):
    with sharing_files(world, late) as (alone, group):
        check(alone, transport="peer", process_group=group, **options)


@on_ranks(3)
@pytest.mark.parametrize(
    ("late", "options"),
    [
        (True, {"bucket_mb": SMALL, "name": "AdamW"}),
        (True, {"clip": True}),
        (False, {"bucket_mb": None, "clip": True}),
    ],
)
def test_the_bytes_of_other_ways(world, late, options):
    run(world, checks.whole_steps, late, **({"bucket_mb": FEW} | options))


@on_ranks(2)
@pytest.mark.parametrize(("late", "options"), [(True, {}), (False, {}), (True, ROUNDED), (True, NARROWED)])
def test_micro_batches_and_gradients_that_somebody_assigned(world, late, options):
    """Those that are rounded are copied to memory that buckets have in turns."""
    run(world, checks.micro_batches, late, bucket_mb=FEW, **options)


@on_ranks(2, nightly=[3])
@pytest.mark.parametrize(("late", "options"), [(True, {}), (False, {"name": "AdamW"}), (True, ROUNDED)])
def test_steps_that_come_to_nothing(world, late, options):
    run(world, checks.nothing_comes_of_it, late, bucket_mb=FEW, **options)


@on_ranks(2)
def test_one_optimizer_goes_on_from_another(world):
    run(world, checks.one_after_another, late=True, bucket_mb=FEW)


@on_ranks(2)
def test_no_rank_waits_in_a_backward_pass(world):
    """Not even where the others make none, nor for steps that no rank takes; describe() says what is done."""

    def check(alone, transport, **options):
        net, optimizer = make(alone, transport="auto", overlap="backward", bucket_mb=TINY, **options)
        described = optimizer.describe()
        ways = ("transport", "why_collective", "overlap", "accumulate", "in_buckets")
        assert [described[way] for way in ways] == ["peer", None, "backward", "local", True]
        gradients = sum(bucket["gradients"] for bucket in described["buckets"])
        assert described["bytes_sent"]["gradients"] == gradients > 0
        if world.rank == 0:
            for seed in range(3):
                loss_of(net, alone, seed).backward()
                optimizer.zero_grad()
        assert optimizer._peers.log == []
        loss_of(net, alone, 4).backward()
        optimizer.step()
        assert optimizer._peers.log == ["arrive"]
        check_weights(list(net.parameters()), optimizer)

    run(world, check, late=True)
