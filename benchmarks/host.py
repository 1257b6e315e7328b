"""What a step, and calls on tensors so small that nothing but the host counts, cost beside memory traffic."""

import argparse
import gc
from functools import partial

import torch
from torch import nn

import zerofp4
from benchmarks.rules import HOST_COUNTS, MODEL_COUNT
from benchmarks.session import Session
from benchmarks.workloads import Tensors, chosen, many, parameters_of

SIDE = 32
LIST_ITEMS = 448
"""Both sides of Llama-3-8B's linear weights."""


def host(session: Session, options: argparse.Namespace) -> None:
    """Host time and launches of a step at 10, 224 and 2,000 weights and of single calls; a plan's memory."""
    for count in dict.fromkeys(max(1, count // options.scale) for count in HOST_COUNTS):
        step_of_plan(session, Tensors(many(count), session.device))
    weights = max(1, MODEL_COUNT // options.scale)
    all_gather(session, weights)
    linear(session)
    quantize_and_swizzle(session)
    optimizer_step(session, weights)
    if not session.clock.is_cuda:
        session.say("launches and device memory are a GPU's: left out on a CPU")
        return
    for workload in chosen(options):
        device_memory(session, Tensors(workload, session.device))


def step_of_plan(session: Session, tensors: Tensors) -> None:
    """CastPlan.step() and post(), and how much more the function takes that finds its plan by itself."""
    work = "" if session.clock.is_cuda else ", the work of 32x32 weights included"
    plan, count = tensors.plan(), len(tensors.weights)
    step = session.clock.host_us(plan.step)
    session.count(f"host_step/{count}", "host_us", step, f"CastPlan.step(){work}")
    session.host(f"host_post/{count}", plan.post, f"CastPlan.post(){work}")
    arguments = (tensors.weights, tensors.masters, tensors.starts)
    function = session.clock.host_us(lambda: zerofp4.cast_master_weights_to_nvfp4(*arguments))
    rule = "cast_master_weights_to_nvfp4() less CastPlan.step(), over the number of weights"
    session.count(f"host_function/{count}", "host_us_per_weight", (function - step) / count, rule)
    session.launches(f"launches/local_step/{count}", plan.step)
    session.launches(f"launches/transpose/{count}", plan.post)


def all_gather(session: Session, weights: int) -> None:
    """In a world of one, which has every element."""
    model = [zerofp4.empty((SIDE, SIDE), device=session.device) for _ in range(weights)]
    masters = [torch.randn(weight.numel(), device=session.device) for weight in model]
    plan = zerofp4.CastPlan(model, masters, [0] * weights)
    session.host(f"host_all_gather/{weights}", plan.all_gather, "CastPlan.all_gather(), a world of one")


def linear(session: Session) -> None:
    """F.linear with an NVFP4 weight, forward and backward, less the same with a plain one."""
    x = torch.randn(4, SIDE, device=session.device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(SIDE, SIDE, device=session.device, dtype=torch.bfloat16)
    gradient = torch.ones_like(x)

    def step(parameter: nn.Parameter) -> None:
        x.grad = parameter.grad = None
        nn.functional.linear(x, parameter).backward(gradient)

    plain = session.clock.host_us(partial(step, nn.Parameter(weight)))
    ours = partial(step, nn.Parameter(zerofp4.quantize(weight, columnwise=True)))
    rule = "F.linear forward and backward with an NVFP4 weight, less the same with a bfloat16 one"
    session.host("host_linear", ours, rule, less=plain, plain_us=plain)


def quantize_and_swizzle(session: Session) -> None:
    x = torch.randn(SIDE, SIDE, device=session.device, dtype=torch.bfloat16)
    options = {"block": (1, 16), "columnwise": True, "hadamard": True}
    options["scale_layouts"] = ("compact", "swizzled")
    rule = "quantize(hadamard=True), scales swizzled"
    session.host("host_quantize_rht_swizzled", lambda: zerofp4.quantize(x, **options), rule)
    tensors = [zerofp4.quantize(x, block=(1, 16)) for _ in range(LIST_ITEMS)]
    call = partial(zerofp4.swizzle_scales, tensors)
    session.host(f"host_swizzle_scales_new/{LIST_ITEMS}", call, "swizzle_scales of a list")


def optimizer_step(session: Session, weights: int) -> None:
    """A world of one, with nothing to reduce: what ZeroFP4Optimizer adds to the optimizer that it wraps."""
    parameters = parameters_of([(SIDE, SIDE)] * weights, session.device)
    optimizer = zerofp4.optim.ZeroFP4Optimizer(parameters, torch.optim.AdamW, lr=1e-3, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones(SIDE, SIDE, device=session.device, dtype=torch.bfloat16)
    whole = session.clock.host_us(optimizer.step)
    optimizer.inner.found_inf = torch.zeros((), device=session.device)  # which torch reads, as in a step
    inner = session.clock.host_us(optimizer.inner.step)
    rule = "ZeroFP4Optimizer.step() in a world of one, less the step of its torch.optim.AdamW(fused=True)"
    session.count(f"host_zero_step/{weights}", "host_us", whole - inner, rule, inner_us=inner)


def device_memory(session: Session, tensors: Tensors) -> None:
    """The most that building a plan and stepping it adds to masters and weights, less the amax vector."""
    gc.collect()  # what is freed meanwhile would count as less
    session.clock.synchronize()
    before = torch.cuda.memory_allocated(session.device)
    torch.cuda.reset_peak_memory_stats(session.device)
    plan = tensors.plan()
    plan.step()
    plan.post()
    session.clock.synchronize()
    beyond = torch.cuda.max_memory_allocated(session.device) - before - plan.reduced.nbytes
    rule = "peak of building and stepping a plan, beyond masters, weights and the vector of amaxes"
    percent = 100 * beyond / tensors.flat.nbytes
    name = f"device_memory/{tensors.workload.name}"
    session.count(name, "percent_of_shard", percent, rule, bytes=beyond)
