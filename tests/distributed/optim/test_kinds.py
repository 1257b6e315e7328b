"""Weights in blocks of 1x16 and with four over six: scales are made by who owns a block, and gathered."""

import contextlib
import math

import pytest
import torch
from cases.optim import assert_all_equal, keywords, set_gradients
from helpers import assert_bytes_equal
from torch import nn

import zerofp4
from distributed.engine.file_peers import sharing_files
from distributed.optim.cases import gradients_of, model_bytes, whole_masters
from distributed.run import on_ranks
from zerofp4 import FourOverSix
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.ops import GATHER_VECTOR
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer
from zerofp4.testing import verify_weights

ROWS = {"block": (1, 16), "scale_layouts": SCALE_LAYOUTS}
KINDS = [
    ROWS,
    {"block": (1, 16), "four_over_six": FourOverSix()},
    {"four_over_six": FourOverSix(448, "mse"), "columnwise": True, "scale_layouts": SCALE_LAYOUTS},
    {},
]
SHAPES = [(34, 288), (130, 66), (8, 1000), (3, 18, 34), (2, 2)]
ODD = [(33, 50), (1, 2), (131, 66)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
SMALL = 0.003


def make(world, cls=FusedAdamW, kinds=KINDS, **options):
    """Weights of all kinds, which cuts go through, dense parameters beside them; and an optimizer."""
    generator = torch.Generator().manual_seed(5)
    parameters = []
    for k, kind in enumerate(kinds):
        shapes = SHAPES + (ODD if kind.get("block") == (1, 16) else [])
        for i, shape in enumerate(shapes):
            values = torch.randn(shape, generator=generator) * 10.0 ** (i % 3 - 1)
            weight = zerofp4.quantize(values.to(world.device, DTYPES[(i + k) % 3]), **kind)
            parameters.append(nn.Parameter(weight))
        dense = torch.randn((7, 30 + k), generator=generator).to(world.device, DTYPES[k % 3])
        parameters.append(nn.Parameter(dense))
    return parameters, ZeroFP4Optimizer(parameters, cls, **keywords(OPTIONS, options))


def take_step(world, parameters, optimizer, step):
    """Clipped in the second, skipped in the third."""
    set_gradients(parameters, gradients_of(world, parameters, step))
    if step == 2 and world.rank == world.world_size - 1:
        parameters[3].grad = torch.full_like(parameters[3], math.inf)
    if step == 1:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    assert (optimizer.found_inf.item() != 0) == (step == 2)


def check(parameters, optimizer):
    """Every buffer is what the specification makes of the whole master, and the same on all ranks."""
    named = {str(i): p for i, p in enumerate(parameters)}
    verify_weights(named, whole_masters(parameters, optimizer), process_group=optimizer.process_group())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("late", "cls", "options"),
    [
        (None, FusedAdamW, {"bucket_mb": None}),
        (None, torch.optim.AdamW, {}),
        (None, FusedAdamW, {"overlap": "both"}),
        (None, FusedAdamW, {"state": "compact"}),  # whose groups a slice must not cut, either
        (None, FusedAdamW, {"state": "compact", "bucket_mb": None}),
        (True, FusedAdamW, {"overlap": "forward"}),
        (False, FusedAdamW, {"overlap": "backward"}),
    ],
)
def test_the_bytes_of_the_whole_master_after_each_step(world, late, cls, options):
    """late: of copies of ranks that share memory, in files on the CPU; None for collectives, or GPUs."""
    if late is not None and world.world_size == 1:
        return
    files = contextlib.nullcontext((world, None)) if late is None else sharing_files(world, late)
    with files as (alone, group):
        model = make(alone, cls, **{"bucket_mb": SMALL, "process_group": group} | options)
        assert late is None or model[1].describe()["transport"] == "peer"
        check(*model)
        for step in range(4):
            take_step(alone, *model, step)
            check(*model)


@on_ranks(2)
@pytest.mark.parametrize(("kind", "scales"), [(ROWS, 2**16), (KINDS[2], 2**12), ({}, 0)])
def test_the_bytes_that_are_gathered(world, kind, scales):
    """Half a byte an element, the scales that travel, and a word of each rank beside them."""
    weight = nn.Parameter(zerofp4.quantize(torch.ones(1024, 1024, device=world.device), **kind))
    bias = nn.Parameter(torch.ones(1024, device=world.device))
    optimizer = ZeroFP4Optimizer([weight, bias])
    packed = 2**19 + scales + (2 * GATHER_VECTOR if scales else 0)
    expected = {"nvfp4": packed, "high_precision": 4096, "bf16_equivalent": 2 * (2**20 + 2**10)}
    assert optimizer.gathered_bytes_per_step() == expected
    assert optimizer.describe()["bytes_sent"]["weights"] == (packed + 4096) // 2


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(ROWS, (48, 64)), ({}, (48, 64)), ({}, (3, 18, 64))],
    ids=["rows", "tiles", "experts"],
)
def test_members_of_an_amax_group_are_in_one_bucket(world, kind, shape):
    """Though they are no neighbours: alone in it, or beside all others. Experts share it by their index."""
    models = []
    for bucket_mb in (1e-4, None):
        generator = torch.Generator().manual_seed(2)
        values = [torch.randn(shape, generator=generator).to(world.device) * 3**i for i in range(4)]
        parameters = [nn.Parameter(zerofp4.quantize(value, **kind)) for value in values]
        options = keywords(OPTIONS, bucket_mb=bucket_mb, amax_groups=[parameters[::2]])
        models.append((parameters, ZeroFP4Optimizer(parameters, FusedAdamW, **options)))
    for step in range(2):
        for parameters, optimizer in models:
            set_gradients(parameters, gradients_of(world, parameters, step))
            optimizer.step()
            assert_bytes_equal(parameters[0].amax, parameters[2].amax, "amax")
            named = {str(i): p for i, p in enumerate(parameters)}
            verify_weights(named, optimizer.gathered_masters(), amax_groups=[parameters[::2]])
        assert_all_equal(*(model_bytes(parameters) for parameters, _ in models), f"step {step}")
