"""Megatron-Core's own DDP and distributed optimizer train NVFP4 weights: zerofp4.integrations.megatron."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from cases.optim import keywords
from helpers import assert_bytes_equal
from megatron_wheel import megatron_groups, why_no_megatron

from distributed.cases import shared_folder
from distributed.run import on_ranks
from zerofp4.optim import ZeroFP4Optimizer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(why_no_megatron() is not None, reason=str(why_no_megatron())),
]

LIMIT = 240.0  # the first to run imports Megatron

BUCKETS = {"overlap_grad_reduce": True}
OVERLAP = {**BUCKETS, "overlap_param_gather": True}

# Megatron pads for a bandwidth of many ranks, and wants more than one bucket of what it pads.
PADDED = {**BUCKETS, "pad_buckets_for_high_nccl_busbw": True}


def train(gpt, steps: int = 2, micro_batches: int = 1, **options):
    """A model that was trained for some steps; its weights were right after each."""
    trained = gpt.build(**options)
    for index in range(steps):
        gpt.step(trained, index, micro_batches)
        gpt.gather_now(trained)
        wrong = gpt.wrong_bytes(trained)
        assert wrong == 0, f"{wrong} bytes are not of the quantized masters after step {index} with {options}"
    return trained


def quantized_masters_after_every_step(world, gpt):
    plain = train(gpt)
    assert len(plain.weights()) == 8 and len(plain.model.buffers[-1].buckets) == 1
    train(gpt, micro_batches=2, ddp={"grad_reduce_in_fp32": True}, converted="")
    overlapped = train(gpt, steps=3, micro_batches=3, ddp=OVERLAP, columnwise=True)
    assert len(overlapped.model.buffers[-1].buckets) > 1
    some = train(gpt, ddp=OVERLAP, converted="mlp", add_bias_linear=True)
    assert len(some.weights()) == 4


BREAKING = {2: [{**PADDED, "bucket_size": 40_000}], 3: [BUCKETS, {**PADDED, "bucket_size": 70_000}]}
"""By number of ranks: where Megatron's own layout gathers bytes from ranks that did not cast them."""


def with_original_layout():
    """Megatron lays packed codes out itself again, the rest of the hook stays."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    from zerofp4.integrations.megatron import hook

    name = "_compute_nvfp4_packed_layout"
    original = next(value for owner, n, value in hook._replaced if owner is _ParamAndGradBuffer and n == name)
    return mock.patch.object(_ParamAndGradBuffer, name, original)


def bytes_from_the_rank_that_cast_them(world, gpt):
    for ddp in BREAKING[world.world_size]:
        train(gpt, hidden=64, layers=3, ddp=ddp)
        with with_original_layout():
            trained = gpt.build(hidden=64, layers=3, ddp=ddp)
            gpt.step(trained, 0)
            assert gpt.wrong_bytes(trained) > 0, f"{ddp} breaks nothing"


def steps_of_zerofp4_optimizer_with_the_same_gradients(world, gpt):
    options = {"lr": 1e-2, "weight_decay": 0.1}
    trained = gpt.build(hidden=32, layers=1, optimizer={"clip_grad": 0.0, **options})
    other = gpt.model(hidden=32, layers=1)
    optimizer = ZeroFP4Optimizer(other.parameters(), torch.optim.AdamW, **keywords(options))
    pairs = list(zip(trained.model.module.parameters(), other.parameters(), strict=True))
    for index in range(10):
        loss = gpt.step(trained, index)
        with torch.no_grad():
            assert gpt.forward(other, 1000 * index).mean().item() == loss, f"step {index}"
        gradients = gpt.reduced_gradients(trained)
        for mine, theirs in pairs:
            theirs.grad = gradients[mine].to(theirs.dtype)
        optimizer.step()
    assert gpt.wrong_bytes(trained) == 0


def initial_values_that_the_first_step_frees(world, gpt):
    """Megatron does so for weights that this rank owns a part of, and has asked for the values of the others
    for nothing.
    """
    trained = gpt.build()
    values = (weight.get_high_precision_init_val() for weight in trained.weights().values())
    held = [weakref.ref(value) for value in values if value is not None]
    assert held
    gpt.step(trained, 0)
    assert not any(value() is not None for value in held)


def masters_that_are_not_finite(world, gpt):
    """The next step raises on every rank."""
    trained = gpt.build()
    gpt.step(trained, 0)
    weight = next(iter(trained.weights().values()))
    if getattr(weight, "main_param", None) is not None:  # on the ranks that own a part of it
        weight.main_param[-1] = float("nan")
    before = weight.rowwise_data.clone()
    gpt.step(trained, 1)
    assert weight.rowwise_data.equal(before)
    with pytest.raises(FloatingPointError, match="NaN or Inf in the step before this one"):
        gpt.step(trained, 2)
    if getattr(weight, "main_param", None) is not None:
        weight.main_param[-1] = 0.0
    for index in (3, 4):  # it was told once
        gpt.step(trained, index)
        assert gpt.wrong_bytes(trained) == 0


def masters_that_start_from_values(world, gpt):
    """From those of a checkpoint that has no masters, or of the weights that were loaded."""
    plain = gpt.build(nvfp4=False)
    gpt.step(plain, 0)
    values = plain.model.module.state_dict()
    trained = gpt.build()
    trained.model.module.load_state_dict(values)
    trained.optimizer.reload_model_params(state_dict=dict(values))
    found = gpt.named_masters(trained)
    assert all(master.equal(values[name.replace("module.", "")].float()) for name, master in found.items())
    assert gpt.wrong_bytes(trained) == 0  # the weights of the model are these values, quantized
    trained.optimizer.reload_model_params()
    found, weights = gpt.named_masters(trained), trained.weights()
    assert all(found[name].equal(weight.dequantize().float()) for name, weight in weights.items())
    gpt.step(trained, 1)
    assert gpt.wrong_bytes(trained) == 0


CHECKS = [
    quantized_masters_after_every_step,
    bytes_from_the_rank_that_cast_them,
    steps_of_zerofp4_optimizer_with_the_same_gradients,
    initial_values_that_the_first_step_frees,
    masters_that_are_not_finite,
    masters_that_start_from_values,
]


@on_ranks(2, time_limit=LIMIT)
def test_two_ranks(world):
    """All in one set of Megatron's groups, which takes longer to make than most of them."""
    with megatron_groups() as gpt:
        for check in CHECKS:
            check(world, gpt)


@on_ranks(3, time_limit=LIMIT)
def test_three_ranks(world):
    with megatron_groups() as gpt:
        bytes_from_the_rank_that_cast_them(world, gpt)


EXPERTS = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none"}


@on_ranks(4, time_limit=LIMIT)
@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ({"tp": 2}, {"ddp": BUCKETS, "sequence_parallel": True}),
        pytest.param({"tp": 4}, {"ddp": OVERLAP}, marks=pytest.mark.nightly),
        ({"ep": 2}, {"ddp": OVERLAP, **EXPERTS}),
    ],
    ids=["tp2", "tp4", "ep2"],
)
def test_other_parallelism(world, groups, options):
    """(The test of checkpoints has pipelines, and data parallelism alone.)"""
    with megatron_groups(**groups) as gpt:
        trained = train(gpt, **options)
        if "num_moe_experts" in options:
            experts = [weight for name, weight in trained.weights().items() if "experts" in name]
            assert len(experts) == 2 * 2 * 2 and not any(weight.allreduce for weight in experts)
            assert len(trained.optimizers()) == 2
            gpt.forget_routes(trained)


@on_ranks(4, time_limit=LIMIT)
def test_checkpoints_of_other_ranks_and_of_bf16(world):
    folder = shared_folder(world)
    with megatron_groups(pp=2) as gpt:
        first = train(gpt, micro_batches=3, ddp=OVERLAP)
        before = gpt.fingerprints(first)
        assert len(before) == 8
        gpt.save(first, folder / "pp2")
    with megatron_groups() as gpt:
        second = gpt.build(ddp=OVERLAP)
        for weights in (False, True):
            gpt.load(second, folder / "pp2", weights=weights)
            assert gpt.fingerprints(second) == before and gpt.wrong_bytes(second) == 0
        gpt.step(second, 2)
        gpt.gather_now(second)
        assert gpt.wrong_bytes(second) == 0
        gpt.save(second, folder / "dp4")

        plain, third = gpt.build(nvfp4=False), gpt.build()
        gpt.load(plain, folder / "dp4")
        assert_same_masters(gpt, plain, second)
        gpt.step(plain, 3)
        gpt.save(plain, folder / "bf16")
        gpt.load(third, folder / "bf16")
        assert_same_masters(gpt, plain, third)
        assert gpt.wrong_bytes(third) == 0
        gpt.step(third, 4)
        assert gpt.wrong_bytes(third) == 0


@on_ranks(2, time_limit=LIMIT)
def test_weights_follow_masters_from_a_file_of_their_own(world):
    """Of the chain of one optimizer for dense parameters and one for experts."""
    folder = shared_folder(world)
    with megatron_groups(ep=2) as gpt:
        first, second = train(gpt, **EXPERTS), gpt.build(**EXPERTS)
        assert len(second.optimizers()) == 2
        own = folder / str(world.rank)  # ranks that share masters use the file of one of them
        gpt.save_masters(first, own)
        gpt.load_masters(second, own)
        assert_same_masters(gpt, first, second)
        for name, weight in second.weights().items():
            pairs = zip(weight.record.buffers(), first.weights()[name].record.buffers(), strict=True)
            for (what, mine), (_, theirs) in pairs:
                assert_bytes_equal(mine, theirs, f"{name}: {what}")
        for trained in (first, second):
            gpt.forget_routes(trained)


def assert_same_masters(gpt, one, other) -> None:
    found = [gpt.named_masters(trained) for trained in (one, other)]
    assert found[0].keys() == found[1].keys()
    assert all(found[0][name].equal(found[1][name]) for name in found[0])
