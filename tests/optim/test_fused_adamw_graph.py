"""FusedAdamW in CUDA graphs, and chains of kernels each of which may start while the one before still runs:
whatever holds blocks of them up, the bytes are those of waiting after every stage.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from cases.cast import make
from cases.optim import (
    READ_THERE,
    SPECIFICATIONS,
    assert_all_equal,
    assert_weights_follow,
    built,
    make_gradients,
    set_gradients,
    turn_gradients,
)
from distributed.optim.fused_cases import OPTIONS, Expected, set_gradient
from helpers import assert_bytes_equal, captured, collect_garbage, needs_gpu

import zerofp4
from zerofp4 import ops
from zerofp4.format import SCALE_LAYOUTS
from zerofp4.optim import FusedAdamW

SHAPES = [(34, 288), (130, 66), (256, 512), (16, 16)]
STEPS, WARM_UP = 1000, 3
LONGEST = 20000  # cycles of a sleeping kernel: about what a stage of these sizes takes, with its launch


class Chain:
    """Update, amaxes, scales, codes, transposes of weights and a gradient that is made of what came out: an
    error in any stage of any step is in the masters ever after.
    """

    def __init__(self):
        torch.manual_seed(0)
        self.weights, self.masters, starts = make("cuda", SHAPES)
        self.targets = [torch.randn_like(master) for master in self.masters]
        for master in self.masters:
            master.grad = torch.randn_like(master)
        self.plan = zerofp4.CastPlan(self.weights, self.masters, starts)
        self.optimizer = FusedAdamW(self.masters, **OPTIONS, capturable=True)
        self.optimizer.offer_amaxes(self.plan)
        options = {"columnwise": True, "scale_layouts": SCALE_LAYOUTS}
        self.copies = [zerofp4.quantize(weight.dequantize(), **options) for weight in self.weights]
        self.stages = (self.optimizer.step, self.plan.step, self.plan.post, self.make_gradients)

    def make_gradients(self) -> None:
        values = zerofp4.dequantize_many(self.weights, torch.float32)
        for master, value, copy, target in zip(self.masters, values, self.copies, self.targets, strict=True):
            zerofp4.quantize(value.bfloat16(), columnwise=True, out=copy)
            eight = zerofp4.quantize_mxfp8(copy.dequantize(torch.float32))
            master.grad.copy_(eight.dequantize(torch.float32).flatten())
            master.grad.sub_(target)

    def run(self, steps: int, between: Callable[[], object]) -> None:
        for _ in range(steps):
            for stage in self.stages:
                stage()
                between()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "reduced vector", self.plan.reduced
        for i, (master, weight, copy) in enumerate(zip(self.masters, self.weights, self.copies, strict=True)):
            yield f"master {i}", master
            yield f"gradient {i}", master.grad
            for name, tensor in self.optimizer.state[master].items():
                yield f"{name} {i}", tensor
            for what, record in (("weight", weight.record), ("copy", copy.record)):
                for name, buffer in record.buffers():
                    yield f"{what} {i} {name}", buffer


class Noise:
    """Sleeping kernels in the stream of the chain, and on side streams what takes away some or all of the
    multiprocessors for a while: the same in every run, and never twice the same in one.
    """

    def __init__(self):
        self.calls = 0
        self.sides = [torch.cuda.Stream() for _ in range(2)]
        self.large = torch.empty(1 << 24, device="cuda")

    def __call__(self) -> None:
        self.calls += 1
        kind = self.calls * 7919 % 101
        if kind % 3 == 0:
            torch.cuda._sleep(1 + kind * LONGEST // 101)
        with torch.cuda.stream(self.sides[kind % 2]):
            if kind % 5 == 0:
                self.large.mul_(0.5)
            if kind % 4 == 0:
                torch.cuda._sleep(1 + kind * LONGEST // 101)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    chain = Chain()
    chain.run(WARM_UP + STEPS, torch.cuda.synchronize)
    return {name: tensor.clone() for name, tensor in chain.state()}


def check(chain: Chain, expected: dict[str, torch.Tensor]) -> None:
    torch.cuda.synchronize()
    assert expected["master 0"].isfinite().all() and expected["weight 0 rowwise_data"].any()
    found = dict(chain.state())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_bytes_equal(tensor, expected[name], name)


@pytest.mark.heavy
@needs_gpu
@pytest.mark.parametrize("count", [1, 3])
def test_stages_on_streams_in_turn(expected, count):
    """count: of streams."""
    chain, noise = Chain(), Noise()
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(count - 1))]
    last = streams[0]
    for step in range(WARM_UP + STEPS):
        for i, stage in enumerate(chain.stages):
            stream = streams[(step + i) % count]
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                stage()
                noise()
            last = stream
    check(chain, expected)


@pytest.mark.heavy
@needs_gpu
@pytest.mark.parametrize("sleeps", [False, True], ids=["alone", "beside a sleeping branch"])
def test_in_a_graph(expected, sleeps):
    chain, noise, branch = Chain(), Noise(), torch.cuda.Stream()

    def step():
        if not torch.cuda.is_current_stream_capturing():
            return chain.run(WARM_UP, noise)
        capturing = torch.cuda.current_stream()
        if sleeps:
            branch.wait_stream(capturing)
            with torch.cuda.stream(branch):
                torch.cuda._sleep(LONGEST)
        chain.run(1, lambda: torch.cuda._sleep(LONGEST // 10) if sleeps else None)
        if sleeps:
            capturing.wait_stream(branch)

    graph = captured(step)
    for _ in range(STEPS):
        graph.replay()
        noise()
    check(chain, expected)


# Graphs


@pytest.fixture
def gpu(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs are captured on a GPU")
    return device


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_replays_of_a_cuda_graph(gpu, tensor_lr):
    """The gradients are made inside the graph, at other addresses than in the step before the capture; an
    eager step between replays has others still.
    """
    masters = [torch.randn(n, device=gpu) for n in (5, 4096, 700)]
    lr = torch.tensor(0.01, device=gpu) if tensor_lr else 0.01
    optimizer = FusedAdamW(masters, **OPTIONS | {"lr": lr}, capturable=True)
    expected, source = Expected(optimizer), torch.randn(4096, device=gpu)

    def scaled(scale, _, p):
        return source[: p.numel()] * scale

    def step():
        if not torch.cuda.is_current_stream_capturing():
            return expected.compare_steps((1, 2), scaled)
        for p in masters:
            p.grad = scaled(3, 0, p)
        optimizer.step()

    graph = captured(step)
    gradients = [p.grad for p in masters]
    for replay in range(4):
        source.normal_()
        if tensor_lr:
            lr.mul_(0.5)
        for p, gradient in zip(masters, gradients, strict=True):
            p.grad = gradient.copy_(scaled(3, 0, p))
        expected.step()
        graph.replay()
        expected.check(f"replay {replay}:")
        if replay == 1:
            optimizer.zero_grad()
            expected.compare_steps((0.5,), scaled)


def test_capture_needs_capturable_and_a_step_before(gpu):
    def capture(optimizer, message):
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match=message):
            optimizer.step()

    p = torch.randn(64, device=gpu)
    p.grad = torch.ones_like(p)
    optimizer = FusedAdamW([p], capturable=True)
    capture(optimizer, r"the first step\(\) with these parameters and gradient dtypes cannot be captured")
    assert not optimizer.state
    optimizer.step()
    set_gradient(p, torch.ones_like(p).bfloat16())
    capture(optimizer, r"the first step\(\) with these parameters and gradient dtypes cannot be captured")
    optimizer.step()
    optimizer.param_groups[0]["capturable"] = False
    capture(optimizer, r"param_groups\[0\]\['capturable'\] must be True")


def test_what_a_graph_uses_outlives_an_offer(device):
    """A replay reads descriptors that the optimizer itself needs no more."""
    weights, masters, starts = make(device)
    optimizer, plan = FusedAdamW(masters, capturable=True), zerofp4.CastPlan(weights, masters, starts)
    optimizer.step()
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        optimizer.step()
    stage = weakref.ref(optimizer._parts[0].stages[False])
    for _ in range(2):
        optimizer.offer_amaxes(plan)
        optimizer.step()
        optimizer.offer_parts([(masters, plan)])
        optimizer.step()
        collect_garbage()
        assert stage() is not None


@needs_gpu
@pytest.mark.parametrize(
    ("specifications", "clips", "turned"),
    [(READ_THERE, True, True), (SPECIFICATIONS, False, True), (SPECIFICATIONS, False, False)],
)
def test_steps_in_a_cuda_graph(specifications, clips, turned):
    """Clipped or not, of gradients of which some must be copied, with a NaN in some replays."""
    device = torch.device("cuda")
    options = {"lr": 0.01, "weight_decay": 0.1, "specifications": specifications, "capturable": True}
    models, norms = [built(device, FusedAdamW, **options) for _ in range(2)], {}

    def step_of(one):
        norms[one] = one.clip_grad_norm_(0.5) if clips else None
        one.step()

    (parameters, optimizer), (others, other) = models
    for ps, _ in models:
        set_gradients(ps, make_gradients(ps, 0))
        if turned:
            turn_gradients(ps[1::2])
    step_of(other)
    graph = captured(lambda: step_of(optimizer))
    for step in range(1, 5):
        gradients = make_gradients(others, step)
        if step == 2:
            gradients[3][0, 0] = math.nan
        for p, q, gradient in zip(parameters, others, gradients, strict=True):
            p.grad.copy_(gradient)
            q.grad = p.grad.clone()
        step_of(other)
        graph.replay()
        if clips:
            assert_bytes_equal(norms[optimizer], norms[other], f"step {step}: norm")
        assert (optimizer.found_inf.item() != 0) == (step == 2)
        assert optimizer.first_nonfinite() == ("param_groups[0]['params'][3]" if step == 2 else None)
        assert_all_equal(optimizer.gathered_masters(), other.gathered_masters(), f"step {step}: master")
        assert_weights_follow(parameters, optimizer.gathered_masters())
    assert optimizer.skipped_steps == 1
