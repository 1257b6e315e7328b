"""Parameters, gradients and expectations that the tests of the ZeRO optimizer share."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_all_equal, assert_bytes_equal
from torch import nn
from torch.nn import functional as F

import zerofp4
from zerofp4 import NVFP4Tensor, quantize, reference
from zerofp4.optim import Communication, ZeroFP4Optimizer

# (shape, dtype, quantized): ragged tiles, sizes below and above the alignment, an empty one, a scalar; three
# experts.
SPECIFICATIONS = [
    ((34, 48), torch.bfloat16, True),
    ((7,), torch.bfloat16, False),
    ((16, 34), torch.float32, True),
    ((5, 3), torch.float32, False),
    ((130, 66), torch.float16, True),
    ((300,), torch.float16, False),
    ((0,), torch.bfloat16, False),
    ((), torch.float32, False),
    ((3, 18, 34), torch.bfloat16, True),
]
READ_THERE = [
    ((48, 64), torch.bfloat16, True),
    ((34, 48), torch.bfloat16, True),
    ((3, 16, 32), torch.bfloat16, True),
    ((5, 3), torch.bfloat16, False),
    ((7,), torch.float32, False),
]
"""Of which every bucket is one whose gradients FusedAdamW reads where they are."""


def keywords(*options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Keyword arguments of a ZeroFP4Optimizer; options of Communication among them are gathered there."""
    found = {name: value for given in (*options, more) for name, value in given.items()}
    names = [field.name for field in dataclasses.fields(Communication) if field.name in found]
    travel = {name: found.pop(name) for name in names}
    return found | ({"communication": Communication(**travel)} if travel else {})


def make_parameters(device: torch.device, seed: int = 0, specifications=SPECIFICATIONS) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape, dtype, quantized in specifications:
        values = torch.randn(shape, generator=generator).to(device, dtype)
        made.append(nn.Parameter(quantize(values, columnwise=True) if quantized else values))
    return made


def make_gradients(parameters: list[nn.Parameter], step: int) -> list[torch.Tensor]:
    """FP32 gradients of very different sizes, the same for the same step. They have bfloat16 values, whose
    mean over ranks that all have the same is exactly this value.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        (torch.randn(p.shape, generator=generator) * 10.0 ** (i % 5 - 2)).bfloat16().float().to(p.device)
        for i, p in enumerate(parameters)
    ]


def set_gradients(parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = None if gradient is None else gradient.to(p.dtype)


def take_step(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    """seed: of the gradients."""
    set_gradients(parameters, make_gradients(parameters, seed))
    optimizer.step()


def built(device, optimizer_class=torch.optim.AdamW, seed=None, specifications=SPECIFICATIONS, **options):
    """Parameters and an optimizer of them. seed: of the gradients that they have; None for none."""
    parameters = make_parameters(device, specifications=specifications)
    optimizer = ZeroFP4Optimizer(parameters, optimizer_class, **keywords(options))
    if seed is not None:
        set_gradients(parameters, make_gradients(parameters, seed))
    return parameters, optimizer


def everything(parameters, optimizer, *others: torch.Tensor) -> list[torch.Tensor]:
    """Copies of all that a step changes, but for found_inf, and of the others."""
    tensors = [*others, *optimizer.gathered_masters()]
    for p in parameters:
        tensors += [b for _, b in p.record.buffers()] if isinstance(p, NVFP4Tensor) else [p.detach()]
    for inner in optimizer.inners.all:
        for _, state in sorted(inner.state_dict()["state"].items()):
            tensors += [state[key] for key in sorted(state)]
    return [tensor.clone() for tensor in tensors]


@contextlib.contextmanager
def unchanged(parameters, optimizer, *others: torch.Tensor) -> Iterator[None]:
    """What is done inside changes nothing of everything()."""
    before = everything(parameters, optimizer, *others)
    yield
    assert_all_equal(everything(parameters, optimizer, *others), before, "tensor")


def assert_refused(optimizer, message: str, kind: type[Exception] = RuntimeError) -> None:
    """By both calls that begin a step, again and again."""
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        with pytest.raises(kind, match=message):
            call()


def through_a_file(saved: Any) -> Any:
    """What torch.load reads of what torch.save has written."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def turn_gradients(parameters: list[nn.Parameter]) -> None:
    """Have those of several dimensions in another order in memory."""
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad.transpose(0, -1).contiguous().transpose(0, -1)


def plain_masters(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The FP32 values that masters without an initial value begin with."""
    return [
        (p.dequantize(torch.float32) if isinstance(p, NVFP4Tensor) else p).detach().float().clone()
        for p in parameters
    ]


def assert_weights_follow(parameters: list[nn.Parameter], masters: list[torch.Tensor]) -> None:
    """Every buffer of every weight is what the specification makes of the whole FP32 master."""
    for i, (p, master) in enumerate(zip(parameters, masters, strict=True)):
        if not isinstance(p, NVFP4Tensor):
            assert_bytes_equal(p.detach(), master.to(p.dtype), f"parameter {i}")
            continue
        specified = reference.quantize if p.dim() == 2 else reference.quantize_experts
        expected = specified(master.to(p.dtype).view(p.shape))
        for name, value in expected._asdict().items():
            assert_bytes_equal(getattr(p, name), value, f"parameter {i}: {name}")


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
}


class Plain:
    """What ZeroFP4Optimizer is equal to: a torch optimizer over whole FP32 masters."""

    def __init__(self, parameters, optimizer_class, groups=None, **defaults):
        self.parameters = parameters
        self.masters = plain_masters(parameters)
        position = {id(p): i for i, p in enumerate(parameters)}
        groups = groups or [{"params": parameters}]
        self.optimizer = optimizer_class(
            [{**g, "params": [self.masters[position[id(p)]] for p in g["params"]]} for g in groups],
            **defaults,
        )

    def take_gradients(self):
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad = None if p.grad is None else p.grad.to(torch.float32, copy=True).contiguous()

    def step(self, gradients=None):
        """gradients: of the parameters; None for those that they have."""
        if gradients is None:
            self.take_gradients()
        else:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient
        self.optimizer.step()


def both(device, optimizer_class, specifications=SPECIFICATIONS, **options):
    """The plain optimizer of parameters, and a ZeroFP4Optimizer of them."""
    parameters = make_parameters(device, specifications=specifications)
    plain = Plain(parameters, optimizer_class, **options)
    return plain, ZeroFP4Optimizer(parameters, optimizer_class, **keywords(options))


def take_steps(plain, optimizer, steps):
    """The same steps with both, after each of which every byte is the same."""
    for step in steps:
        set_gradients(plain.parameters, make_gradients(plain.parameters, step))
        plain.step()
        optimizer.step()
        check(optimizer, plain, f"step {step}:")


def check(optimizer, plain, what=""):
    masters = optimizer.gathered_masters()
    assert_all_equal(masters, plain.masters, f"{what} master")
    assert_weights_follow(plain.parameters, masters)


class Net(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.first = nn.Linear(32, 48, dtype=dtype)
        self.norm = nn.LayerNorm(48, dtype=torch.float32)
        self.second = nn.Linear(48, 6, dtype=dtype)

    def forward(self, x):
        hidden = self.norm(F.gelu(self.first(x)).float())
        return self.second(hidden.to(self.second.weight.dtype)).float()


def make_net(device, seed=0):
    torch.manual_seed(seed)
    net = Net().to(device)
    zerofp4.convert_model(net, columnwise=True)
    return net


def batch(device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 32, generator=generator).to(device, torch.bfloat16)
