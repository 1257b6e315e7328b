"""Parameters, gradients and expectations that the tests of the ZeRO optimizer share."""

from __future__ import annotations

import torch
from helpers import assert_bytes_equal
from torch import nn

from zerofp4 import NVFP4Tensor, quantize, reference

# (shape, dtype, quantized): ragged tiles, sizes below and above the alignment, an empty one, a scalar.
SPECIFICATIONS = [
    ((34, 48), torch.bfloat16, True),
    ((7,), torch.bfloat16, False),
    ((16, 34), torch.float32, True),
    ((5, 3), torch.float32, False),
    ((130, 66), torch.float16, True),
    ((300,), torch.float16, False),
    ((0,), torch.bfloat16, False),
    ((), torch.float32, False),
    ((2, 3, 32), torch.bfloat16, True),
]


def make_parameters(device: torch.device, seed: int = 0, specifications=SPECIFICATIONS) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape, dtype, quantized in specifications:
        values = torch.randn(shape, generator=generator).to(device, dtype)
        made.append(nn.Parameter(quantize(values, columnwise=True) if quantized else values))
    return made


def make_gradients(parameters: list[nn.Parameter], step: int) -> list[torch.Tensor]:
    """FP32 gradients of very different sizes, the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        (torch.randn(p.shape, generator=generator) * 10.0 ** (i % 5 - 2)).to(p.device)
        for i, p in enumerate(parameters)
    ]


def set_gradients(parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = None if gradient is None else gradient.to(p.dtype)


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
        expected = reference.quantize(master.to(p.dtype).view(p.record.matrix))
        for name, value in expected._asdict().items():
            assert_bytes_equal(getattr(p, name), value, f"parameter {i}: {name}")


def assert_all_equal(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bytes_equal(a, e, f"{what} {i}")
