"""ZeroFP4Optimizer beside reference.zero_step(): the same bytes, however gradients and weights travel."""

from __future__ import annotations

import contextlib
import math
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distributed.cases import is_last
from distributed.engine.file_peers import sharing_files
from distributed.optim.cases import by_default
from distributed.optim.step_cases import TINY, Pair, gradient_values, only_the_first
from distributed.run import on_ranks

SPECIFICATIONS = [
    ((34, 48), torch.bfloat16, True),
    ((24, 128), torch.bfloat16, True),
    ((16, 66), torch.float32, True),
    ((18, 34), torch.float16, True),
    ((9, 80), torch.float16, False),
    ((6, 192), torch.bfloat16, False),
    ((300,), torch.bfloat16, False),
    ((5, 3), torch.float32, False),
    ((), torch.float32, False),
    ((40, 160), torch.bfloat16, True),
]
"""In compact state masters of 24 bits and of 32, and rows that groups divide and that they do not."""

EXCHANGES = {
    "collective": {"transport": "collective"},
    "reduce_scatter": {"transport": "collective", "reduction": "reduce_scatter"},
    "early peers": {"transport": "peer"},
    "late peers": {"transport": "peer"},
    "hosts, bf16": {"between_hosts": "bf16"},
    "hosts, MXFP8": {"between_hosts": "mxfp8"},
    "hosts, NVFP4": {"between_hosts": "nvfp4"},
    "hosts, bf16 of most": {"between_hosts": "bf16", "exactly": only_the_first},
    "hosts, MXFP8 of most": {"between_hosts": "mxfp8", "exactly": only_the_first},
    "hosts, NVFP4 of most": {"between_hosts": "nvfp4", "exactly": only_the_first},
}


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("overlap", [None, "backward", "forward", "both", "update"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_bytes_of_the_reference(world, exchange, overlap, state, clips):
    if world.world_size > 1 or exchange == "collective":  # alone a rank has nobody to exchange with
        take_steps(world, exchange, overlap, clips, state=state)


@on_ranks(2, 4)
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if "hosts" in name])
@pytest.mark.parametrize("dtypes", [{"gradient_dtype": torch.float32}, {"gradient_wire": torch.float16}])
def test_gradients_of_other_dtypes_inside_hosts(world, exchange, dtypes):
    take_steps(world, exchange, "both", True, **dtypes)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("overlap", [None, "forward"])
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if "hosts" in name])
def test_replicas_on_hosts(world, exchange, overlap, state):
    """The bytes of ranks that are all in one group."""
    take_steps(world, exchange, overlap, True, state=state, replicated=True)


@on_ranks(2, 4)
@pytest.mark.parametrize("exchange", ["collective", "hosts, NVFP4"])
def test_a_backward_pass_after_a_refused_step_waits_for_nobody(world, exchange):
    """The refused step has sent gradients that no rank has used."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
    options = {"overlap": "backward", "bucket_mb": TINY, "on_nonfinite": "raise"}
    pair = Pair(SPECIFICATIONS, group, **EXCHANGES[exchange] | options)
    gradients = gradients_of(world, 0, False)
    gradients[3][1, 1] = math.nan
    pair.loss(gradients).backward()
    with pytest.raises(FloatingPointError):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.forget()
    for rank in range(world.world_size):
        if rank == world.rank:
            pair.loss(gradients_of(world, 1, False)).backward()
        dist.barrier()
    pair.optimizer.step()
    assert not pair.step()
    pair.check("the step after it")


DTYPES = [
    {"gradient_wire": torch.float32},
    {"gradient_wire": torch.float16},
    {"gradient_dtype": torch.float32},
    {"gradient_dtype": torch.float32, "gradient_wire": torch.bfloat16},
]


@on_ranks(2, 3)
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if "hosts" not in name])
@pytest.mark.parametrize("overlap", [None, "both", "update"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_gradients_of_other_dtypes(world, exchange, overlap, dtypes):
    """Those that no update reads as they travel are averaged in memory that buckets take turns in."""
    take_steps(world, exchange, overlap, False, **dtypes)


@on_ranks(2, 3)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overlap", [None, "forward", "update"])
def test_votes_that_no_host_waits_for(world, overlap, clips):
    """So it is with NCCL; here any backend does as it is told."""
    take_steps(world, "collective", overlap, clips, defers=True)


@on_ranks(2)
@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("overlap", [None, "both", "update"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_steps_under_another_default_dtype(world, overlap, state, dtype):
    with by_default(dtype):
        take_steps(world, "collective", overlap, True, state=state)


def take_steps(world, exchange: str, overlap: str | None, clips: bool, defers=False, **options) -> None:
    """With gradients that ranks lack, micro-batches, and a NaN that skips a step, or a bucket."""
    options = EXCHANGES[exchange] | options | {"overlap": overlap}
    options["bucket_mb"] = (
        TINY if overlap == "update" else None if options.get("state") == "compact" else 0.003
    )
    exact = exchange == "reduce_scatter"
    if exact:
        options["gradient_wire"] = torch.bfloat16
    peers = sharing_files(world, late=exchange == "late peers") if "peers" in exchange else None
    whole = dist.new_group(backend="gloo") if world.device.type == "cuda" else dist.group.WORLD
    with peers or contextlib.nullcontext((None, whole)) as (_, group):
        pair = Pair(SPECIFICATIONS, group, **options)
        pair.optimizer._agreement.defers |= defers
        pair.check("before the first step")
        for step in range(5):
            if step == 1 and overlap != "update":
                with pair.optimizer.no_sync():
                    pair.loss(gradients_of(world, 10 + step, exact)).backward()
            gradients = gradients_of(world, step, exact)
            if step == 2 and is_last(world):
                gradients[3][1, 1] = math.nan
            pair.loss(gradients).backward()
            if clips and overlap != "update":
                most = sys.float_info.max  # infinite in FP32
                pair.clip(*[(0.5, 2.0), (math.inf, math.inf), (0.3, 2.0), (most, 1.0), (0.1, 3.0)][step])
                if step == 1:
                    pair.clip(0.01)
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            assert pair.step() == (step == 2)
            assert (pair.optimizer.first_nonfinite() is not None) == (step == 2)
            pair.check(f"step {step}")
            pair.forget()


def gradients_of(world, step: int, exact: bool) -> list[torch.Tensor | None]:
    """Each rank lacks some, and all lack one."""
    seeds = [100 * step + 10 * i + world.rank for i in range(len(SPECIFICATIONS))]
    specified = zip(seeds, SPECIFICATIONS, strict=True)
    made = [gradient_values(seed, shape, dtype, exact) for seed, (shape, dtype, _) in specified]
    return [
        gradient if i == 3 or ((i + step) % 4 and (i + step + world.rank) % 5) else None
        for i, gradient in enumerate(made)
    ]
