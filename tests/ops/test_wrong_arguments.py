"""Whatever a public function is called with, it returns or raises an error that tells what is wrong: it never
crashes, and never writes beside its outputs. Under --hypothesis-profile=night these are 50,000 calls.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guards import Guards
from helpers import freed
from hypothesis import given
from hypothesis import strategies as st

import zerofp4
from zerofp4.format import BLOCK

ZEROFP4 = torch.ops.zerofp4
SHAPE = (34, 80)
CALLS = 5  # of an example
KINDS = (TypeError, ValueError, RuntimeError, NotImplementedError)
"""Any other error would be Python's own, and say nothing about the argument."""

Call = tuple[Callable, list[Any]]


# Calls that are right


def matrix(device) -> torch.Tensor:
    return torch.randn(SHAPE, device=device).bfloat16()


def quantize_dequantize(device) -> Call:
    def function(x, block, stochastic, four_over_six):
        options = {"stochastic_rounding": stochastic, "four_over_six": four_over_six}
        return zerofp4.quantize_dequantize(x, block=block, **options)

    return function, [matrix(device), (1, BLOCK), False, zerofp4.FourOverSix()]


def quantize_mxfp8(device) -> Call:
    def function(x, columnwise, layouts, out, skip):
        return zerofp4.quantize_mxfp8(x, columnwise=columnwise, scale_layouts=layouts, out=out, skip=skip)

    out = zerofp4.quantize_mxfp8(matrix(device), columnwise=True)
    return function, [matrix(device), True, ["compact"], out, torch.zeros(1, device=device)]


def scales(device) -> Call:
    def function(scale, shape, block):
        swizzled = zerofp4.swizzle_scales([(scale, shape)])
        return zerofp4.unswizzle_scales([(swizzled[0], shape)], block=block)

    return function, [zerofp4.quantize(matrix(device)).rowwise_scale, SHAPE, (BLOCK, BLOCK)]


def quantize(device) -> Call:
    def function(x, block, amax, hadamard, stochastic, layouts, out, skip):
        options = {"amax": amax, "hadamard": hadamard, "stochastic_rounding": stochastic, "skip": skip}
        return zerofp4.quantize(x, block=block, scale_layouts=layouts, out=out, columnwise=True, **options)

    amax, skip = torch.ones(1, device=device), torch.zeros(1, device=device)
    out = zerofp4.empty(SHAPE, device=device)
    return function, [matrix(device), (BLOCK, BLOCK), amax, False, False, ["compact"], out, skip]


def lists(device) -> Call:
    def function(first, second, dtype, columnwise):
        values = zerofp4.dequantize_many([first, second], dtype)
        return values, zerofp4.swizzle_scales([first, second], columnwise=columnwise)

    tensors = [zerofp4.quantize(matrix(device), columnwise=True) for _ in range(2)]
    return function, [*tensors, torch.float32, False]


def grouped(device) -> Call:
    return zerofp4.quantize_grouped, [matrix(device), [16, 0, 18]]


def product(device) -> Call:
    def function(a, b, out_dtype, bias, accumulate_into):
        return zerofp4.gemm(a, b, out_dtype=out_dtype, bias=bias, accumulate_into=accumulate_into)

    a, b = (zerofp4.quantize(matrix(device), block=(1, BLOCK)) for _ in range(2))
    into = torch.zeros(SHAPE[0], SHAPE[0], device=device)
    return function, [a, b, torch.float32, torch.zeros(SHAPE[0], device=device), into]


def cast(device) -> Call:
    def function(weight, master, start, shard):
        shards = None if shard is None else [shard]
        options = {"fsdp_shard_model_weights": shards}
        plan = zerofp4.CastPlan([weight], [master], [start], **options)
        plan.step()
        plan.post()

    weight = zerofp4.empty(SHAPE, device=device)
    weight.zero_()
    return function, [weight, torch.randn(101, device=device), 33, None]


CALLS_THAT_ARE_RIGHT = (quantize, quantize_dequantize, quantize_mxfp8, scales, lists, grouped, product, cast)


# What may be wrong with an argument


def at_any_address(t: torch.Tensor) -> torch.Tensor:
    """A right argument."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return memory[1:].view(t.shape).copy_(t)


METHODS = "flatten float double bfloat16 int bool to_sparse requires_grad_ cpu tolist".split()
OF_TENSORS = (
    *(operator.methodcaller(name) for name in METHODS),
    lambda t: t[:-1],
    lambda t: t[1:],
    lambda t: t[:0],
    lambda t: t[..., :-1],
    lambda t: t[..., :-2].contiguous(),
    lambda t: t[0],
    lambda t: t.unsqueeze(0),
    lambda t: t.mT,
    lambda t: t.mT.contiguous(),
    lambda t: torch.cat([t, t]),
    lambda t: torch.cat([t, t], -1),
    lambda t: torch.cat([t, t], -1)[..., ::2],
    lambda t: t[:1].expand(t.shape),
    lambda t: t.to(torch.complex64).imag,
    lambda t: t.to(torch.complex64).conj().imag,
    lambda t: t.view(torch.uint8),
    lambda t: t.view(torch.int8),
    lambda t: t.to("meta"),
    lambda t: t.new_empty(0),
    lambda t: t.new_empty(()),
    lambda t: t.new_zeros(2, 2, 2),
    lambda t: zerofp4.quantize(t.float().expand(2, *t.shape).reshape(2, -1)),
    lambda t: [t],
    lambda t: torch._efficientzerotensor(t.shape),
    freed,
    at_any_address,
)
NUMBERS = (0, 1, -1, 2, 3, 16, 448, 2**31, 2**62, -(2**63), 2**64, 0.5, float("nan"), True, False)
DTYPES = (torch.float32, torch.int8, torch.device("cpu"))
VALUES = (None, *NUMBERS, "", "compact", "mse", "swizzled", [], (), [None], {}, *DTYPES, object())


def changed(value: Any, draw: random.Random) -> Any:
    """Something else in the place of an argument."""
    if isinstance(value, list) and value and draw.random() < 0.8:
        value = list(value)
        at = draw.randrange(len(value))
        kind = draw.randrange(4)
        if kind == 0:
            del value[at]
        elif kind == 1:
            value.append(value[at])
        else:
            value[at] = changed(value[at], draw)
        return value
    if isinstance(value, torch.Tensor) and draw.random() < 0.8:
        try:
            return draw.choice(OF_TENSORS)(value.detach().clone())
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None  # not every tensor can be changed in every way
    if isinstance(value, int) and draw.random() < 0.3:
        return value + draw.choice((-1, 1, 2, 16, 2**31, 2**32, 2**60))
    return draw.choice(VALUES)


def call_wrongly(make: Callable[..., Call], device, seed: int) -> None:
    """The right call with one to three other arguments, between guards."""
    draw, guards = random.Random(seed), Guards(0xA5, 0)
    with guards.placing():
        function, arguments = make(device)
        count = min(draw.choice((1, 1, 2, 3)), len(arguments))
        for at in draw.sample(range(len(arguments)), count):  # once each: torch cannot change a freed tensor
            arguments[at] = changed(arguments[at], draw)
        try:
            function(*arguments)
        except KINDS:
            pass
    guards.check()


calls = pytest.mark.parametrize("make", CALLS_THAT_ARE_RIGHT, ids=lambda make: make.__name__)


@calls
def test_the_calls_are_right(device, make):
    function, arguments = make(device)
    function(*arguments)


@calls
def test_memory_that_is_gone_is_refused(make):
    """On the CPU, where torch frees it in place: a kernel would read address 0, or what is others'."""
    _, arguments = make("cpu")
    for i, argument in enumerate(arguments):
        if type(argument) is torch.Tensor:
            function, arguments = make("cpu")
            arguments[i] = freed(arguments[i].clone())
            with pytest.raises(RuntimeError, match="freed"):
                function(*arguments)


@pytest.mark.parametrize("columnwise", [2, 1, None, "rowwise"])
def test_a_columnwise_that_is_no_bool_is_refused(columnwise):
    tensor, mxfp8 = zerofp4.quantize(matrix("cpu")), zerofp4.quantize_mxfp8(matrix("cpu"))
    for call in (
        lambda: zerofp4.swizzle_scales([tensor], columnwise=columnwise),
        lambda: zerofp4.unswizzle_scales([tensor], columnwise=columnwise),
        lambda: tensor.swizzled_scale(columnwise),
        lambda: tensor.expanded_scale(columnwise),
        lambda: mxfp8.swizzled_scale(columnwise),
    ):
        with pytest.raises(TypeError, match=f"columnwise must be True or False, got {columnwise!r}"):
            call()


@given(make=st.sampled_from(CALLS_THAT_ARE_RIGHT), seed=st.integers(0, 2**63))
def test_wrong_arguments(device, make, seed):
    for call in range(CALLS):
        call_wrongly(make, device, seed + call)
