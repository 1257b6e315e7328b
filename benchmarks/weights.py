"""Lists of weights: the local step of a cast and its stages, transposes, and AdamW that leaves amaxes."""

import argparse

import torch

import zerofp4
from benchmarks import peers, rules
from benchmarks.session import Session
from benchmarks.workloads import ADAMW, Tensors, chosen
from zerofp4.optim.moments import Slice
from zerofp4.shard import Shard

STAGES = {
    "begin": ("cast_begin", rules.begin),
    "amax": ("partial_amax", rules.amax),
    "scale": ("fused_scale", rules.scale),
    "cast": ("partial_cast", rules.cast),
}
"""Of a step, in their order: a word in the name of the kernel, and how its bytes are counted."""

KINDS = {
    "1d": {"block": (1, 16)},
    "1d_four_over_six": {"block": (1, 16), "four_over_six": zerofp4.FourOverSix()},
    "2d_four_over_six": {"block": (16, 16), "four_over_six": zerofp4.FourOverSix()},
}
"""Of weights whose scales the cast makes, as rows call them: what empty() is given."""

ROW = 4096
"""Elements of a row of the matrix that stands for a list in compact state."""


def local_step(session: Session, options: argparse.Namespace) -> None:
    """CastPlan.step() of a world of one, on a GPU each kernel of it in a profile, and peers."""
    for workload in chosen(options):
        tensors, name = Tensors(workload, session.device), workload.part_name
        plan = tensors.plan()
        ours = session.time(f"local_step/{name}", plan.step, rules.local_step(workload))
        if session.clock.is_cuda:
            stages = {f"{stage}/{name}": (word, rule(workload)) for stage, (word, rule) in STAGES.items()}
            session.time_kernels(plan.step, stages)
        if options.peers:
            peers.bf16_copy(session, tensors, ours)
            peers.references(session, tensors, ours)


def local_step_blocks(session: Session, options: argparse.Namespace) -> None:
    """CastPlan.step() of weights in blocks of 1x16, and with four over six, whose cast makes their scales."""
    for workload in chosen(options):
        for kind, settings in KINDS.items():
            if settings.get("four_over_six") and workload.owned < workload.elements:
                continue  # shards must have whole blocks
            plan = Tensors(workload, session.device, **settings).plan()
            part, each = f"{kind}/{workload.part_name}", 16 if settings["block"] == (1, 16) else 256
            session.time(f"local_step_{part}", plan.step, rules.cast_blocks(each, reads=2)(workload))
            if session.clock.is_cuda:
                stages = {
                    f"amax_{part}": ("partial_amax", rules.read_masters(workload)),
                    f"cast_{part}": ("partial_cast", rules.cast_blocks(each)(workload)),
                }
                session.time_kernels(plan.step, stages)


def transpose(session: Session, options: argparse.Namespace) -> None:
    """CastPlan.post(): the packed transposes of all weights."""
    for workload in chosen(options):
        plan = Tensors(workload, session.device).plan()
        session.time(f"transpose/{workload.name}", plan.post, rules.transpose(workload))


def adamw(session: Session, options: argparse.Namespace) -> None:
    """FusedAdamW over the owned masters, and the cast with its amaxes; the same with torch.optim.AdamW."""
    for workload in chosen(options):
        tensors = Tensors(workload, session.device)
        masters = with_gradients(tensors)
        plan = tensors.plan()
        optimizer = zerofp4.optim.FusedAdamW(masters, **ADAMW)
        optimizer.offer_amaxes(plan)  # so that its steps read the masters once
        ours = with_and_without_cast(session, tensors, "adamw", optimizer, plan)
        if options.peers:
            optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
            theirs = with_and_without_cast(session, tensors, "torch_adamw", optimizer, tensors.plan())
            for mine, peer in zip(ours, theirs, strict=True):
                mine["speedup"] = session.compare(mine, peer)
        if workload.part is not None:
            compact_adamw(session, tensors)


def compact_adamw(session: Session, tensors: Tensors) -> None:
    """The same in compact state, with masters of 24 bits and bfloat16 gradients, as one matrix."""
    shape = torch.Size((tensors.flat.numel() // ROW, ROW))
    high = tensors.flat[: shape.numel()].bfloat16()
    high.grad, low = torch.randn_like(high).mul_(1e-2), torch.zeros_like(high, dtype=torch.uint8)
    high.zerofp4_slice = Slice(shape, Shard(0, shape.numel()), low, 0)  # as ZeroFP4Optimizer makes masters
    optimizer = zerofp4.optim.FusedAdamW([high], **ADAMW, state="compact")
    rule = "12.25n: masters of 3 bytes and moments read and written, bfloat16 gradient read"
    moved = rules.Moved(12.25 * shape.numel(), rule, shape.numel())
    session.time(f"adamw_compact/{tensors.workload.name}", optimizer.step, moved)


def with_gradients(tensors: Tensors) -> list[torch.Tensor]:
    """The masters that exist, each with a gradient that is a view of one flat buffer like theirs."""
    gradients = torch.randn_like(tensors.flat).mul_(1e-2)
    masters = [master for master in tensors.masters if master is not None]
    for master in masters:
        master.grad = gradients[master.storage_offset() :][: master.numel()]
    return masters


def with_and_without_cast(
    session: Session, tensors: Tensors, name: str, optimizer: torch.optim.Optimizer, plan: zerofp4.CastPlan
) -> list[dict]:
    """Rows of both. The bytes are those that ours needs, whatever the optimizer."""
    workload = tensors.workload

    def step_and_cast() -> None:
        optimizer.step()
        plan.step()

    then_cast = f"{name}_then_cast/{workload.name}"
    return [
        session.time(f"{name}/{workload.name}", optimizer.step, rules.adamw(workload)),
        session.time(then_cast, step_and_cast, rules.adamw_then_cast(workload)),
    ]
