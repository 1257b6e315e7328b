"""ZeroFP4Optimizer over several ranks: the bytes of one machine, at any world size."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from helpers import assert_bytes_equal
from optim_cases import (
    assert_all_equal,
    assert_weights_follow,
    make_gradients,
    make_parameters,
    plain_masters,
    set_gradients,
)
from torch import nn

from distributed.checks_optim import (
    Injected,
    assert_same_on_all_ranks,
    averages,
    check_weights,
    loss_of,
    make_net,
    model_bytes,
    parameters_of,
)
from distributed.run import on_ranks
from zerofp4 import NVFP4Tensor, ops, reference
from zerofp4.optim import ZeroFP4Optimizer


def check_training(world):
    """The ranks differ until the optimizer gives them rank 0's values; then they never differ again."""
    net = make_net(world, seed=world.rank)
    values = [p.detach().clone() for p in make_net(world, seed=0).parameters()]
    optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
    parameters = list(net.parameters())
    check_weights(parameters, optimizer)
    assert_all_equal([p.detach().float() for p in parameters], [v.float() for v in values], "value of rank 0")
    for step in range(4):
        loss_of(net, world, step).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        check_weights(parameters, optimizer)


@on_ranks(1, 2, 3, 4)
def test_weights_are_the_quantized_masters_on_every_rank(world):
    check_training(world)


@on_ranks(2, launcher="mpirun")
def test_weights_are_the_quantized_masters_under_mpirun(world):
    check_training(world)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adagrad", {}),
    ],
)
def test_same_gradients_same_masters_at_any_world_size(world, name, options):
    options = {"lr": 0.02, "weight_decay": 0.1, **options}
    optimizer_class = getattr(torch.optim, name)
    parameters = parameters_of(world)
    masters = plain_masters(parameters)
    plain = optimizer_class(masters, **options)
    optimizer = Injected(parameters, optimizer_class, **options)
    for step in range(5):
        set_gradients(parameters, make_gradients(parameters, step))
        for master, p in zip(masters, parameters, strict=True):
            master.grad = p.grad.float()
        plain.step()
        optimizer.step()
        assert_all_equal(optimizer.gathered_masters(), masters, f"step {step}: master")
        check_weights(parameters, optimizer)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_mb", [None, 0.001, 0.003])
def test_gradients_are_averaged_in_rank_order(world, bucket_mb):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0, bucket_mb=bucket_mb)
    before = optimizer.gathered_masters()
    for round_ in range(2):  # every piece of staging is used again
        set_gradients(parameters, make_gradients(parameters, world.rank + 10 * round_))
        optimizer.step()
        means = averages([p.grad for p in parameters])
        expected = [m - mean for m, mean in zip(before, means, strict=True)]
        assert_all_equal(optimizer.gathered_masters(), expected, "master")
        before = expected


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_rounded_to_what_travels(world, wire):
    """Each rank's own, before they are added, in a world of one too."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0, gradient_wire=wire)
    before = optimizer.gathered_masters()
    set_gradients(parameters, make_gradients(parameters, world.rank))
    optimizer.step()
    means = averages([p.grad.to(wire) for p in parameters])
    expected = [m - mean for m, mean in zip(before, means, strict=True)]
    assert_all_equal(optimizer.gathered_masters(), expected, "master")


@on_ranks(2)
def test_wider_gradients_travel_as_they_are_or_not_at_all(world):
    """float32 gradients of bfloat16 weights: where autograd was told so before the optimizer was built they
    lose nothing; those of one rank that come as a surprise are refused on all.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    told, surprised = parameters_of(world), parameters_of(world)
    for p in told:
        p.grad_dtype = torch.float32
    optimizer = ZeroFP4Optimizer(told, torch.optim.SGD, lr=1.0)
    before = optimizer.gathered_masters()
    gradients = [torch.randn(p.shape, device=world.device) + world.rank for p in told]
    for p, gradient in zip(told, gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    expected = [m - mean for m, mean in zip(before, averages(gradients), strict=True)]
    assert_all_equal(optimizer.gathered_masters(), expected, "master")

    optimizer = ZeroFP4Optimizer(surprised, torch.optim.SGD, lr=1.0)
    set_gradients(surprised, make_gradients(surprised, world.rank))
    if world.rank == 1:
        surprised[1].grad = None
        surprised[1].grad_dtype = torch.float32
        surprised[1].grad = gradients[1]
    for _ in range(2):
        with pytest.raises((TypeError, RuntimeError), match=r"gradient_wire=torch\.float32|rank 1"):
            optimizer.step()
    check_weights(surprised, optimizer)


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"gradient_wire": torch.float32}, {"bucket_mb": 2.0}, {"gradient_dtype": torch.float32}],
)
def test_ranks_must_send_alike(world, options):
    with pytest.raises(ValueError, match="gradient_wire and bucket_mb is"):
        ZeroFP4Optimizer(parameters_of(world), **(options if world.rank else {}))


@pytest.mark.heavy
@on_ranks(2, time_limit=300)
def test_500_steps_equal_quantizing_whole_masters_without_sharding(world):
    """Losses bitwise equal to a loop with whole FP32 masters and the mean gradients in rank order."""
    options = {"lr": 0.003, "weight_decay": 0.01}
    sharded, whole = make_net(world), make_net(world)
    optimizer = ZeroFP4Optimizer(sharded.parameters(), **options)
    parameters = list(whole.parameters())
    masters = [
        (p.get_high_precision_init_val() if isinstance(p, NVFP4Tensor) else p.detach()).to(
            world.device, torch.float32, copy=True
        )
        for p in parameters
    ]
    plain = torch.optim.AdamW(masters, **options)
    losses = []
    for step in range(500):
        loss = loss_of(sharded, world, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = loss_of(whole, world, step)
        expected.backward()
        for master, mean in zip(masters, averages([p.grad for p in parameters]), strict=True):
            master.grad = mean
        plain.step()
        whole.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, parameters, strict=True):
                p.copy_(master)
        assert loss.item() == expected.item(), f"step {step}: {loss.item()!r}, not {expected.item()!r}"
        losses.append(loss.item())
    assert_weights_follow(parameters, masters)
    assert_all_equal(model_bytes(list(sharded.parameters())), model_bytes(parameters), "weight")
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])


@on_ranks(2, 3, 4)
def test_missing_gradients(world):
    """A gradient on some ranks counts as zeros on the others; on none, the parameter is skipped."""
    parameters = parameters_of(world)
    options = {"lr": 0.02, "weight_decay": 0.5}
    masters = plain_masters(parameters)
    plain = torch.optim.AdamW(masters, **options)
    optimizer = ZeroFP4Optimizer(parameters, **options)
    for step in range(3):
        gradients = make_gradients(parameters, 10 * world.rank + step)
        for i in range(len(parameters)):
            only = (i + step) % (world.world_size + 1)
            if i % 2 == 0 and world.rank != only:  # for only == world_size, no rank has one
                gradients[i] = None
        set_gradients(parameters, gradients)
        zeros = [torch.zeros(p.shape, device=world.device) for p in parameters]
        means = averages([z if p.grad is None else p.grad for p, z in zip(parameters, zeros, strict=True)])
        for i, (master, mean) in enumerate(zip(masters, means, strict=True)):
            nowhere = i % 2 == 0 and (i + step) % (world.world_size + 1) == world.world_size
            master.grad = None if nowhere else mean
        plain.step()
        optimizer.step()
        assert_all_equal(optimizer.gathered_masters(), masters, f"step {step}: master")
        check_weights(parameters, optimizer)


@on_ranks(2, 4)
def test_ranks_that_own_nothing(world):
    parameters = make_parameters(
        world.device, 0, [((4, 6), torch.bfloat16, True), ((3,), torch.float32, False)]
    )
    optimizer = Injected(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    owned = sum(m is not None for m in optimizer._shards.masters)
    assert owned == (2 if world.rank == 0 else 0)
    expected = plain_masters(parameters)
    plain = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
    for step in range(3):
        set_gradients(parameters, make_gradients(parameters, step))
        for master, p in zip(expected, parameters, strict=True):
            master.grad = p.grad.float()
        total = optimizer.clip_grad_norm_(1e9)
        assert total.item() == pytest.approx(nn.utils.get_total_norm([m.grad for m in expected]).item())
        optimizer.step()
        plain.step()
        assert_all_equal(optimizer.gathered_masters(), expected, "master")
        check_weights(parameters, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("bucket_mb", [None, 0.003])
def test_the_norm_does_not_depend_on_the_number_of_ranks(world, bucket_mb):
    """The bits of sums of squares of each parameter, for means that are the same."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, bucket_mb=bucket_mb)
    set_gradients(parameters, [g.bfloat16() for g in make_gradients(parameters, 0)])  # sums are exact
    words = sum(reference.square_sums(p.grad.float().flatten().cpu()) for p in parameters)
    total = optimizer.clip_grad_norm_(1.0)
    assert_bytes_equal(total, ops.norm_of_squares(words.to(world.device)), "norm")


@on_ranks(2, 3)
@pytest.mark.parametrize(("norm_type", "wire"), [(1.0, None), (2.0, torch.float32), (math.inf, None)])
def test_clip_is_over_the_gradients_of_all_ranks(world, norm_type, wire):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0, gradient_wire=wire)
    transport = optimizer._transport  # what lies between parameters must not get into the norm
    for memory, received in zip(transport.memory, transport._received, strict=True):
        received.fill_(math.nan)
        if not memory.aliased:
            memory.flat.fill_(math.nan)
    before = optimizer.gathered_masters()
    set_gradients(parameters, make_gradients(parameters, world.rank))
    means = averages([p.grad for p in parameters])
    total = optimizer.clip_grad_norm_(0.7, norm_type)
    assert_same_on_all_ranks([total.reshape(1)])
    # Sums in FP32 of a few hundred elements, in another order than here.
    whole = torch.cat([mean.double().flatten() for mean in means])
    torch.testing.assert_close(total.double(), torch.linalg.vector_norm(whole, norm_type), rtol=1e-6, atol=0)
    optimizer.step()
    scale = (0.7 / (total + 1e-6)).clamp(max=1.0)
    expected = [m - mean * scale for m, mean in zip(before, means, strict=True)]
    assert_all_equal(optimizer.gathered_masters(), expected, "master")
    check_weights(parameters, optimizer)


@on_ranks(2, 3)
def test_a_nan_of_one_rank_is_in_every_norm(world):
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.SGD, lr=1.0)
    set_gradients(parameters, make_gradients(parameters, 0))
    if world.rank == 1:
        parameters[0].grad[0, 0] = math.nan
    assert optimizer.clip_grad_norm_(1.0, math.inf).isnan()
    assert optimizer.clip_grad_norm_(1.0).isnan()
    optimizer.step()
    assert optimizer.found_inf.item() == 1


@on_ranks(1, 2, 3)
def test_a_resumed_run_is_the_same_run(world):
    def run(built, steps):
        net, optimizer, scheduler = built
        for step in steps:
            loss_of(net, world, step).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def build(seed):
        net = make_net(world, seed)
        optimizer = ZeroFP4Optimizer(net.parameters(), lr=0.01)
        return net, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    through, stopped, resumed = build(0), build(0), build(1)
    run(through, range(6))
    run(stopped, range(3))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in stopped[1:]], file)
    file.seek(0)
    for part, state in zip(resumed[1:], torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert_all_equal(
        model_bytes(list(resumed[0].parameters())), model_bytes(list(stopped[0].parameters())), "weight"
    )
    run(resumed, range(3, 6))
    assert_all_equal(resumed[1].gathered_masters(), through[1].gathered_masters(), "master")
    check_weights(list(resumed[0].parameters()), resumed[1])


@on_ranks(2, 3)
def test_frozen_parameters_get_the_bytes_of_rank_0(world):
    parameters = parameters_of(world, seed=world.rank)
    expected = model_bytes(parameters_of(world, seed=0)[:4])
    for p in parameters[:4]:
        p.requires_grad_(False)
    optimizer = ZeroFP4Optimizer(parameters, lr=0.1)
    set_gradients(parameters[4:], make_gradients(parameters, 0)[4:])
    optimizer.step()
    assert_all_equal(model_bytes(parameters[:4]), expected, "frozen parameter")
    assert_same_on_all_ranks(model_bytes(parameters))


@on_ranks(2, 3)
def test_weights_are_gathered_in_place(world):
    """A gather's output is the storage that the weights are views of, its input this rank's slice of it."""
    parameters = parameters_of(world)
    optimizer = ZeroFP4Optimizer(parameters, transport="collective")
    calls = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    collective = getattr(dist, name)

    def recording(output, input, **options):
        calls.append((output.data_ptr(), output.nbytes, input.data_ptr(), input.nbytes))
        return collective(output, input, **options)

    setattr(dist, name, recording)
    try:
        optimizer.step()
    finally:
        setattr(dist, name, collective)
    assert len(calls) == 4
    for p in parameters:
        data = p.rowwise_data if isinstance(p, NVFP4Tensor) else p
        first, last = data.data_ptr(), data.data_ptr() + data.nbytes
        assert not data.numel() or any(at <= first and last <= at + size for at, size, *_ in calls)
    for output, size, input, part in calls:
        assert part * world.world_size == size and input == output + world.rank * part
    sizes = optimizer.gathered_bytes_per_step()
    assert sizes["nvfp4"] + sizes["high_precision"] == sum(size for _, size, *_ in calls)
    assert sizes["bf16_equivalent"] == 2 * sum(p.numel() for p in parameters)


@on_ranks(2, 3)
def test_masters_are_handed_over_to_another_layout(world):
    """Whoever owned a master before, and whatever rank 0 could see of it."""
    parameters = parameters_of(world)
    parameters[2].requires_grad_(False)
    old = ZeroFP4Optimizer(parameters, lr=0.1)
    gradients = make_gradients(parameters, world.rank)
    set_gradients(parameters, [None if i == 2 else gradient for i, gradient in enumerate(gradients)])
    old.step()
    masters = old.gathered_masters()
    masters[2] = parameters[2].dequantize(torch.float32).detach()
    parameters[2].requires_grad_(True)
    order = [4, 5, 2, 7, 0, 1, 6, 3]
    optimizer = ZeroFP4Optimizer([parameters[i] for i in order], torch.optim.SGD, masters_from=old, lr=0.1)
    assert_all_equal(optimizer.gathered_masters(), [masters[i] for i in order], "master")
    check_weights([parameters[i] for i in order], optimizer)
    source = optimizer if world.rank == 0 else None
    with pytest.raises(
        ValueError, match=r"what masters_from hands over is \[0, 1, .*\] on rank 0 and \[\] on"
    ):
        ZeroFP4Optimizer(parameters, masters_from=source)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="masters_from must shard its masters over the same process group"):
        ZeroFP4Optimizer(parameters, masters_from=optimizer, process_group=alone)
    set_gradients(parameters, make_gradients(parameters, 0))
    optimizer.step()
