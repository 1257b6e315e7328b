"""Optimizers of any class over several ranks: those that need whole matrices, those that may run on parts,
and masters that go from one to another.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from cases.optim import (
    assert_all_equal,
    check,
    keywords,
    make_gradients,
    make_parameters,
    set_gradients,
    take_step,
    through_a_file,
)
from helpers import assert_bytes_equal
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distributed.cases import is_last
from distributed.optim.cases import (
    assert_same_on_all_ranks,
    averages,
    by_default,
    check_weights,
    model_bytes,
    parameters_of,
)
from distributed.optim.matrix_cases import BESIDE, MATRICES, MUON, OTHERS, OneProcess, make_groups
from distributed.run import on_ranks
from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


def check_same(optimizer, plain, what: str) -> None:
    check(optimizer, plain, what)
    assert_same_on_all_ranks(model_bytes(plain.parameters), optimizer.process_group())


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("beside", BESIDE)
def test_other_classes_beside_it(world, beside):
    """Gradients are averaged, some are missing, and an lr is changed on the way; a NaN skips a step, though
    Muon cannot be told of it on the device. Clipping does not see the layout: the norm has the bits of that
    of an elementwise optimizer.
    """
    parameters, groups = make_groups(world.device, beside)
    others = make_groups(world.device, beside)[0]
    elementwise = ZeroFP4Optimizer(others, torch.optim.SGD)
    plain = OneProcess(groups, **MUON)
    optimizer = ZeroFP4Optimizer(groups, torch.optim.Muon, **keywords(MUON, bucket_mb=0.003))
    muon, other = optimizer.inners.all
    for step in range(4):
        gradients = make_gradients(parameters, 10 * world.rank + step)
        gradients[0] = None if step % 2 else gradients[0]
        gradients[4] = None
        gradients[10] = gradients[10] if is_last(world) else None
        if step == 2 and is_last(world):
            gradients[9][3, 2, 1] = math.nan
        for own in (parameters, others):
            set_gradients(own, gradients)
        zeros = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in parameters]
        pairs = zip(parameters, zeros, strict=True)
        means = averages([z if p.grad is None else p.grad for p, z in pairs])
        means[0], means[4] = None if step % 2 else means[0], None
        if step % 2:
            total = optimizer.clip_grad_norm_(0.5)
            assert_bytes_equal(total, elementwise.clip_grad_norm_(0.5), "norm")
            factor = (0.5 / (total + 1e-6)).clamp(max=1.0)
            means = [None if mean is None else mean * factor for mean in means]
            elementwise.zero_grad()
        if step != 2:
            plain.step(means)
        optimizer.step()
        check_same(optimizer, plain, f"step {step}:")
        assert (optimizer.found_inf.item(), optimizer.skipped_steps) == (step == 2, step >= 2)
        for g in range(3):
            plain.optimizers[g].param_groups[0]["lr"] /= 2
            optimizer.param_groups[g]["lr"] /= 2
    assert [group["lr"] for group in muon.param_groups] == [0.02 / 8, 0.05 / 8]  # before the last change
    plans = [part.plan for part in other._parts] if beside == "fused" else []
    assert sum(plan is not None for plan in plans) == (beside == "fused")
    described = optimizer.describe()
    assert not described["in_buckets"]
    assert world.world_size == 1 or "Muon updates all masters at once" in described["obstacle"]
    for bucket in described["buckets"]:
        assert bucket["whole_matrices"] == (bucket["optimizer"] == "Muon")
    assert {bucket["optimizer"] for bucket in described["buckets"]} == {"Muon", BESIDE[beside][0].__name__}


@on_ranks(1, 2, 3)
def test_weights_that_share_an_amax_have_different_owners(world):
    parameters = make_parameters(world.device, 0, [((34, 48), torch.bfloat16, True)] * 4)
    options = keywords(MUON, amax_groups=[parameters[::3]], bucket_mb=0.001)
    optimizer = ZeroFP4Optimizer(parameters, torch.optim.Muon, **options)
    take_step(parameters, optimizer, world.rank)
    largest = max(m.to(torch.bfloat16).float().abs().max() for m in optimizer.gathered_masters()[::3])
    for p in parameters[::3]:
        assert_bytes_equal(p.amax, largest.view(p.amax.shape), "amax")


@on_ranks(2, 3)
def test_matrices_that_are_sharded_within_another_group(world):
    """Experts of which every rank has its own: whole with that rank, and averaged with nobody."""
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    shared = make_parameters(world.device, 0, MATRICES[:3])
    experts = make_parameters(world.device, 10 + world.rank, MATRICES[4:6])
    groups = [{"params": shared}, {"params": experts}]
    plain = OneProcess(groups, **MUON)
    groups[1]["process_group"] = alone
    optimizer = ZeroFP4Optimizer(groups, torch.optim.Muon, **MUON)
    for step in range(2):
        set_gradients([*shared, *experts], make_gradients([*shared, *experts], 10 * world.rank + step))
        plain.step([*averages([p.grad for p in shared]), *(p.grad for p in experts)])
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("cls", [torch.optim.SGD, FusedAdamW])
def test_masters_go_from_elements_to_matrices_and_back(world, cls):
    """Whoever owned a master before, and whatever rank 0 could see of it. Parameters that were frozen begin
    with their values.
    """
    parameters, frozen = parameters_of(world), (1, 2)
    for i in frozen:
        parameters[i].requires_grad_(False)
    first = ZeroFP4Optimizer(parameters, lr=0.1)
    gradients = make_gradients(parameters, world.rank)
    set_gradients(parameters, [None if i in frozen else gradient for i, gradient in enumerate(gradients)])
    first.step()
    masters = first.gathered_masters()
    assert not masters[0].equal(parameters[0].detach().float())  # the weight alone would not do
    for i in frozen:
        masters[i] = parameters[i].detach().float().clone()
        parameters[i].requires_grad_(True)
    matrices, others = ([p for p in parameters if (p.dim() > 1) == whole] for whole in (True, False))
    beside = {"params": others, "optimizer_class": FusedAdamW, "lr": 0.1}
    second = ZeroFP4Optimizer([beside, {"params": matrices}], torch.optim.Muon, masters_from=first)
    order = {id(p): m for p, m in zip(parameters, masters, strict=True)}
    assert_all_equal(second.gathered_masters(), [order[id(p)] for p in [*others, *matrices]], "master")
    second.step()
    third = ZeroFP4Optimizer(parameters, cls, masters_from=second, lr=0.1)
    order = {id(p): m for p, m in zip([*others, *matrices], second.gathered_masters(), strict=True)}
    assert_all_equal(third.gathered_masters(), [order[id(p)] for p in parameters], "master")
    source = third if world.rank == 0 else None
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    refused = [
        ({"masters_from": source}, r"\[0\] is .*, of masters_from on rank 0 and .* in group 0 on"),
        ({"masters_from": third, "process_group": alone}, "is sharded over another process group"),
    ]
    for options, message in refused if world.world_size > 1 else ():
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(parameters, **keywords(options))
    with pytest.raises(RuntimeError, match="another ZeroFP4Optimizer was built over these parameters"):
        second.step()
    third.step()
    check_weights(parameters, third)


@on_ranks(2, 4)
def test_ranks_that_own_nothing(world):
    """They save and load, too, as torch.save does it for the same rank."""
    specifications = [((4, 6), torch.bfloat16, True), ((3,), torch.float32, False)]
    groups = [{"params": make_parameters(world.device, 0, specifications)}]
    plain = OneProcess(groups, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = ZeroFP4Optimizer(plain.parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    owned = sum(m is not None for m in optimizer._shards.masters)
    assert owned == (2 if world.rank == 0 else 0)
    for step in range(3):
        if step == 1:
            saved = through_a_file(optimizer.state_dict())
            take_step(plain.parameters, optimizer, 9)
            optimizer.load_state_dict(saved)
        set_gradients(plain.parameters, make_gradients(plain.parameters, step))
        plain.step([p.grad for p in plain.parameters])
        optimizer.clip_grad_norm_(math.inf)
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


@on_ranks(2, 3)
def test_ranks_must_agree_on_who_has_what(world):
    """Before anything has changed, and no rank waits."""
    muon, adamw = torch.optim.Muon, torch.optim.AdamW
    first = r"\[0\]\['params'\]\[0\] is nvfp4 bfloat16 \(34, 48\) in group 0, updated whole on rank 0 and"
    parameters = make_parameters(world.device, 0, MATRICES)
    extra = [torch.nn.Parameter(torch.zeros(3, device=world.device))] * (world.rank == 1)
    whole = r"rank 1: .*\[10\] has shape \(3,\), and torch.optim.Muon gets whole"
    for params, optimizer_class, options, message in [
        (parameters, torch.optim.Adagrad, {"whole_matrices": world.rank == 0}, first),
        (parameters, adamw if world.rank else muon, {}, "optimizer_class of .*Muon'] on rank 0 and"),
        ([*parameters, *extra], muon, {}, whole),
    ]:
        with pytest.raises(ValueError, match=message):
            ZeroFP4Optimizer(params, optimizer_class, **keywords(options))
    for p in parameters:
        codes = p.rowwise_data if isinstance(p, NVFP4Tensor) else p
        assert codes.untyped_storage().nbytes() == codes.nbytes  # no view of a buffer


# Classes that may compute something else from parts of parameters: tried when the optimizer is built


class EachTensor(torch.optim.Optimizer):
    """Has update() compute the change of each tensor."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    lr = torch.as_tensor(group["lr"])  # on the default device, in the default dtype
                    p.sub_(lr * self.update(p, self.state[p]))


class Lion(EachTensor):
    """Elementwise."""

    def update(self, p, state):
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        update = momentum.lerp(p.grad, 0.1).sign()
        momentum.lerp_(p.grad, 0.01)
        return update


class Lamb(EachTensor):
    """A trust ratio for each tensor: of maxima, which have no order of addition."""

    def update(self, p, state):
        return p.grad * p.abs().max() / p.grad.abs().max()


class AdamMini(EachTensor):
    """One second moment for each row."""

    def update(self, p, state):
        squares = p.grad.square().amax(-1, keepdim=True)
        return p.grad / state.setdefault("squares", torch.zeros_like(squares)).lerp_(squares, 0.1).sqrt()


class Prodigy(EachTensor):
    """A step size from sums over all parameters."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr)
        self.begun, self.size = {}, 1e-6

    @torch.no_grad()
    def step(self, closure=None):
        tensors = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moved = sum((p.grad * (self.begun.setdefault(p, p.clone()) - p)).sum() for p in tensors)
        self.size = max(self.size, float(moved / sum(p.grad.abs().sum() for p in tensors)))
        super().step()

    def update(self, p, state):
        return self.size * p.grad.sign()


class NoDecayOfVectors(torch.optim.SGD):
    """A known class, with a step of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(1.0 if p.dim() < 2 else 0.9)
        super().step()


class OnlyMatrices(torch.optim.SGD):
    def step(self, closure=None):
        if any(p.dim() != 2 for p in self.param_groups[0]["params"]):
            raise ValueError("only matrices")
        super().step()


class Stochastic(torch.optim.AdamW):
    """Rounds masters to bfloat16, at random."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            bits = p.view(torch.int32)
            bits.add_(torch.randint_like(bits, 1 << 16)).bitwise_and_(-1 << 16)


class Overflows(torch.optim.SGD):
    """Elementwise, with steps that a trial cannot take."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(0 * p.abs().exp())


class OfGPUs(torch.optim.SGD):
    def step(self, closure=None):
        devices = {p.device.type for group in self.param_groups for p in group["params"]}
        if devices != {OfGPUs.device}:
            raise RuntimeError("no kernel")
        super().step()

    device = "cuda"


PIECES = "cannot run on shards of parameters, from which it computes other values: "
WHOLE, NEVER = "whole_matrices=True gives it whole matrices", "its update depends on other parameters"


@on_ranks(1, 2)
def test_classes_that_need_whole_tensors_are_refused(world):
    """On every rank, before anything has changed. One rank alone has flat tensors, and all of them."""
    several = world.world_size > 1
    parameters = make_parameters(world.device, 0, MATRICES)
    for optimizer_class, options, remedy in [
        (Lamb, {}, several and WHOLE),
        (AdamMini, {}, WHOLE),
        (Prodigy, {}, several and NEVER),
        (Prodigy, {"whole_matrices": True}, several and NEVER),
        (OnlyMatrices, {}, WHOLE),
        (NoDecayOfVectors, {}, WHOLE),
        (NoDecayOfVectors, {"lr": 0.0}, WHOLE),  # as a warm-up begins
        (Lamb, {"lr": torch.tensor(1e-6, device=world.device)}, several and WHOLE),
    ]:
        if remedy:
            with pytest.raises(ValueError, match=rf"\[0\]: .*{optimizer_class.__name__} {PIECES}{remedy}"):
                ZeroFP4Optimizer(parameters, optimizer_class, **options)
            for p in parameters:
                codes = p.rowwise_data if isinstance(p, NVFP4Tensor) else p
                assert codes.untyped_storage().nbytes() == codes.nbytes  # no view of a buffer
        else:
            ZeroFP4Optimizer(make_parameters(world.device, 0, MATRICES), optimizer_class, **options)
    beside = [
        {"params": parameters[:1]},
        {"params": parameters[1:], "optimizer_class": AdamMini},
    ]
    with pytest.raises(ValueError, match=r"\[1\]: .*AdamMini cannot run on shards"):
        ZeroFP4Optimizer(beside, FusedAdamW)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("optimizer_class", "whole", "options", "default"),
    [
        (Lion, False, {"bucket_mb": 0.002}, torch.float32),
        (Lamb, True, {"bucket_mb": 0.002}, torch.float32),
        (AdamMini, True, {}, torch.float32),
        (OfGPUs, False, {}, torch.float32),
        (torch.optim.AdamW, False, {"fused": True}, torch.float32),
        (torch.optim.AdamW, False, {}, torch.float16),
        (torch.optim.SGD, False, {"momentum": 0.9, "nesterov": True, "foreach": True}, torch.bfloat16),
        (torch.optim.Adagrad, False, {}, torch.float64),
        (torch.optim.Muon, True, {"bucket_mb": 0.002}, torch.float32),
        (torch.optim.Muon, True, {"nesterov": False, "momentum": 0.8, "ns_steps": 3}, torch.float32),
        (torch.optim.Adafactor, True, {}, torch.float32),
        (FusedAdamW, True, {}, torch.float32),
    ],
)
def test_steps_are_those_of_one_process(world, optimizer_class, whole, options, default):
    """Whatever torch's default dtype is."""
    OfGPUs.device = world.device.type
    parameters = make_parameters(world.device, 0, MATRICES if whole else [*MATRICES, *OTHERS])
    own = {name: value for name, value in options.items() if name != "bucket_mb"}
    plain = OneProcess([{"params": parameters}], optimizer_class, lr=0.02, **own)
    with warnings.catch_warnings(record=True), by_default(default):
        warnings.simplefilter("always")
        options = keywords(options, lr=0.02, whole_matrices=whole)
        optimizer = ZeroFP4Optimizer(parameters, optimizer_class, **options)
    for step in range(3):
        set_gradients(parameters, make_gradients(parameters, step))
        plain.step([p.grad for p in parameters])
        with by_default(default):
            optimizer.step()
        check_same(optimizer, plain, f"step {step}:")
    described = optimizer.describe()
    assert all(bucket["whole_matrices"] == whole for bucket in described["buckets"])
    if optimizer_class is FusedAdamW and world.world_size > 1:
        assert described["obstacle"] == "whole matrices are updated all at once"


@on_ranks(1, 2)
def test_a_class_that_cannot_be_tried(world):
    """Many run on GPUs alone: a warning says what must hold."""
    OfGPUs.device = "nowhere"
    message = r"OfGPUs cannot be tried on the CPU \(RuntimeError: no kernel\).*an element depends on no other"
    with pytest.warns(UserWarning, match=message):
        ZeroFP4Optimizer(make_parameters(world.device), OfGPUs, lr=0.1)


@on_ranks(1, 2)
@pytest.mark.parametrize("optimizer_class", [Lion, Stochastic, Overflows])
def test_a_trial_leaves_no_trace(world, optimizer_class):
    """Nor does it depend on random numbers, or on defaults of torch. torch's hooks see neither this trial nor
    the one of its state.
    """
    parameters, before, seen = make_parameters(world.device), torch.get_rng_state(), []
    registers = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    handles = [register(lambda *_: seen.append(None)) for register in registers]
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(world.device), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", r"the \d+ parameters have no names|the masters of \d+ weights")
            ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
        for handle in handles:
            handle.remove()
    assert torch.equal(torch.get_rng_state(), before) and not seen
