"""What a step costs beside the memory traffic: host time, launches, device memory."""

import argparse

import torch

import zerofp4
from benchmarking.operations.host_calls import host_calls
from benchmarking.session import Session
from benchmarking.targets import HOST_COUNTS, MODEL_COUNT
from benchmarking.workloads import Tensors, chosen, many
from zerofp4 import CastPlan


def host(session: Session, options: argparse.Namespace) -> None:
    """Host time and launches of a step at 10, 224 and 2,000 weights and of single calls; a plan's memory."""
    for count in dict.fromkeys(max(1, count // options.scale) for count in HOST_COUNTS):
        tensors = Tensors(many(count), session.device)
        plan = tensors.plan()
        host_time(session, tensors, plan)
        if session.clock.is_cuda:
            session.launches(f"launches/local_step/{count}", plan.step)
            session.launches(f"launches/transpose/{count}", plan.post)
    host_calls(session, max(1, MODEL_COUNT // options.scale))
    if not session.clock.is_cuda:
        session.say("launches and device memory are a GPU's: left out on a CPU")
        return
    for workload in chosen(options):
        device_memory(session, Tensors(workload, session.device))


def host_time(session: Session, tensors: Tensors, plan: CastPlan) -> None:
    """CastPlan.step(), and how much more the function takes that finds its plan by itself."""
    work = "" if session.clock.is_cuda else ", the work of 32x32 weights included"
    count = len(tensors.weights)
    step = session.clock.host_us(plan.step)
    session.count(f"host_step/{count}", "host_us", step, f"CastPlan.step(){work}")
    post = session.clock.host_us(plan.post)
    session.count(f"host_post/{count}", "host_us", post, f"CastPlan.post(){work}")
    arguments = (tensors.weights, tensors.masters, tensors.starts)
    function = session.clock.host_us(lambda: zerofp4.cast_master_weights_to_nvfp4(*arguments))
    rule = "cast_master_weights_to_nvfp4() less CastPlan.step(), over the number of weights"
    session.count(f"host_function/{count}", "host_us_per_weight", (function - step) / count, rule)


def device_memory(session: Session, tensors: Tensors) -> None:
    """The most that building a plan and stepping it adds to masters and weights, less the amax vector."""
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
