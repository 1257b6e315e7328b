"""Classes that may compute something else from parts of parameters: tried when the optimizer is built."""

from __future__ import annotations

import warnings

import pytest
import torch
from cases.optim import keywords, make_gradients, make_parameters, set_gradients

from distributed.optim.matrix_cases import MATRICES, OneProcess
from distributed.optim.test_matrices import check_same
from distributed.run import on_ranks
from zerofp4 import NVFP4Tensor
from zerofp4.optim import FusedAdamW, ZeroFP4Optimizer


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


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("optimizer_class", "whole"),
    [(Lion, False), (Lion, True), (Lamb, True), (AdamMini, True), (OfGPUs, False)],
)
def test_other_classes_step_as_in_one_process(world, optimizer_class, whole):
    OfGPUs.device = world.device.type
    parameters = make_parameters(world.device, 0, MATRICES)
    plain = OneProcess([{"params": parameters}], optimizer_class, lr=0.02)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        options = keywords(lr=0.02, whole_matrices=whole, bucket_mb=0.002)
        optimizer = ZeroFP4Optimizer(parameters, optimizer_class, **options)
    for step in range(3):
        set_gradients(parameters, make_gradients(parameters, step))
        plain.step([p.grad for p in parameters])
        optimizer.step()
        check_same(optimizer, plain, f"step {step}:")


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
    """Nor does it depend on random numbers, or on defaults of torch."""
    parameters, before = make_parameters(world.device), torch.get_rng_state()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(world.device), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", r"the \d+ parameters have no names|the masters of \d+ weights")
            ZeroFP4Optimizer(parameters, optimizer_class, lr=0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
