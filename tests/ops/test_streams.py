"""What is filled on one stream and kept, and then used on another one: that waits for it.

A stream that sleeps has not filled anything yet. What lies in the memory until then is known, so that a
stream that does not wait reads that and no stray addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from helpers import assert_all_equal, assert_bytes_equal, needs_gpu

import zerofp4
from zerofp4 import ops
from zerofp4.ops import dequantize, device
from zerofp4.ops.device import Filled

CYCLES = 10**9
MANY = 40  # more than travel in the arguments of a kernel


@contextmanager
def asleep(side: torch.cuda.Stream) -> Iterator[None]:
    """What is queued meanwhile comes behind a sleep, which the device is in until the end of this."""
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    yield
    assert not side.query(), "the stream was done too early to show anything"
    torch.cuda.synchronize()


def on(side: torch.cuda.Stream, call: Callable[[], object]) -> object:
    with torch.cuda.stream(side):
        return call()


def quantized(count: int, seed: int) -> list[zerofp4.NVFP4Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [zerofp4.quantize(torch.randn(32, 64, generator=generator).to("cuda")) for _ in range(count)]


@needs_gpu
def test_the_first_product_on_another_stream(monkeypatch):
    """The amax of products without one is made by the first of them and kept for all."""
    a, b = quantized(2, 0)
    side = torch.cuda.Stream()
    expected = zerofp4.gemm(a, b, backend="exact")  # kernels are loaded, and memory is there
    on(side, lambda: zerofp4.gemm(a, b, backend="exact"))
    monkeypatch.setattr(dequantize, "_neutral_amaxes", {})
    on(side, lambda: torch.full((128,), torch.nan, device="cuda"))  # in whose memory the next amax is made
    with asleep(side):
        first = on(side, lambda: zerofp4.gemm(a, b, backend="exact"))
        found = zerofp4.gemm(a, b, backend="exact")
    assert_bytes_equal(found, expected, "on the current stream")
    assert_bytes_equal(first, expected, "on the stream that made it")


def updated(side: torch.cuda.Stream | None, seed: int) -> list[torch.Tensor]:
    """Masters after an update by a stage that was built on `side`, behind a sleep, or where it is used."""
    generator = torch.Generator().manual_seed(seed)
    masters = [torch.randn(256, generator=generator).to("cuda") for _ in range(MANY)]
    gradients = [torch.ones_like(master) for master in masters]
    steps = [torch.zeros(1, device="cuda") for _ in masters]
    moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in masters]
    items = [
        ops.AdamWItem(master, step, *pair, torch.float32, ())
        for master, step, pair in zip(masters, steps, moments, strict=True)
    ]
    rates = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    options = ops.adamw_options(**rates, maximize=False)

    def run(stage: ops.AdamWStage) -> list[torch.Tensor]:
        stage.begin(options, 0, gradients)
        stage.update()
        return [master.clone() for master in masters]

    if side is None:
        return run(ops.AdamWStage(items, None))
    with asleep(side):
        stage = on(side, lambda: ops.AdamWStage(items, None))
        found = run(stage)
    return found


@needs_gpu
def test_an_update_by_a_stage_that_was_built_on_another_stream():
    side = torch.cuda.Stream()
    expected = updated(None, 0)
    on(side, lambda: updated(None, 1))  # whose table lay where the next one is uploaded
    assert_all_equal(updated(side, 0), expected, "master")


@needs_gpu
def test_each_stream_that_comes_waits():
    """One after the other, and those that come back."""
    side, others = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(2)]
    memory = torch.zeros(1, device="cuda")
    filled = Filled(memory.device)
    found = []
    for stream in others:
        on(stream, memory.clone)  # whose memory is there from now on
    with asleep(side):
        with torch.cuda.stream(side):
            memory.fill_(1)
            filled.note()
        for stream in (*others, *others):
            with torch.cuda.stream(stream):
                filled.wait()
                found.append(memory.clone())
    assert [value.item() for value in found] == [1] * 4


def test_every_other_stream_waits_for_the_event(monkeypatch):
    """By streams that only remember, which need no GPU."""
    waited, state = [], SimpleNamespace(stream=1, capturing=False)
    event = SimpleNamespace(record=lambda stream: waited.append(("recorded", state.stream)))
    stream = SimpleNamespace(wait_event=lambda _: waited.append(("waits", state.stream)))
    cuda = SimpleNamespace(Event=lambda: event, current_stream=lambda _: stream)
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "current_stream", lambda _: state.stream)
    monkeypatch.setattr(device, "is_capturing", lambda _: state.capturing)
    filled = Filled(torch.device("cuda", 0))
    filled.note()
    for state.stream in (1, 2, 2, 3):
        filled.wait()
    state.stream, state.capturing = 4, True
    filled.wait()  # torch.cuda.graph has waited for everything
    assert waited == [("recorded", 1), ("waits", 2), ("waits", 3)]


def test_on_a_cpu_nothing_waits():
    filled = Filled(torch.device("cpu"))
    filled.note()
    filled.wait()
    assert filled.stream is None


@needs_gpu
def test_the_stream_that_fills_does_not_wait(monkeypatch):
    filled = Filled(torch.device("cuda", 0))
    filled.note()
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", None)
    filled.wait()
