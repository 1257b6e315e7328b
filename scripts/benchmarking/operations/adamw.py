"""AdamW that leaves the amaxes behind, alone and with the cast after it, beside torch's."""

import argparse

import torch

import zerofp4
from benchmarking import rules
from benchmarking.session import Session
from benchmarking.workloads import Tensors, chosen
from zerofp4 import CastPlan

ARGUMENTS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def adamw(session: Session, options: argparse.Namespace) -> None:
    """FusedAdamW over the owned masters, and the cast with its amaxes; the same with torch.optim.AdamW."""
    for workload in chosen(options):
        tensors = Tensors(workload, session.device)
        masters = with_gradients(tensors)
        ours = fused_adamw(session, tensors, masters)
        if options.peers:
            for mine, peer in zip(ours, torch_adamw(session, tensors, masters), strict=True):
                mine["speedup"] = session.compare(mine, peer)


def with_gradients(tensors: Tensors) -> list[torch.Tensor]:
    """The masters that exist, each with a gradient that is a view of one flat buffer like theirs."""
    gradients = torch.randn_like(tensors.flat).mul_(1e-2)
    masters = [master for master in tensors.masters if master is not None]
    parts = gradients.split([master.numel() for master in masters])
    for master, gradient in zip(masters, parts, strict=True):
        master.grad = gradient
    return masters


def fused_adamw(session: Session, tensors: Tensors, masters: list[torch.Tensor]) -> list[dict]:
    """FusedAdamW that leaves the amaxes in the plan, whose steps then read the masters once."""
    plan = tensors.plan()
    optimizer = zerofp4.optim.FusedAdamW(masters, **ARGUMENTS)
    optimizer.offer_amaxes(plan)
    return time_both(session, tensors, "adamw", optimizer, plan)


def torch_adamw(session: Session, tensors: Tensors, masters: list[torch.Tensor]) -> list[dict]:
    """torch's fused AdamW, and after it a step with an amax of its own; the bytes count as ours."""
    optimizer = torch.optim.AdamW(masters, fused=True, **ARGUMENTS)
    return time_both(session, tensors, "torch_adamw", optimizer, tensors.plan())


def time_both(
    session: Session, tensors: Tensors, name: str, optimizer: torch.optim.Optimizer, plan: CastPlan
) -> list[dict]:
    workload = tensors.workload

    def step_and_cast() -> None:
        optimizer.step()
        plan.step()

    then_cast = f"{name}_then_cast/{workload.name}"
    return [
        session.time(f"{name}/{workload.name}", optimizer.step, rules.adamw(workload)),
        session.time(then_cast, step_and_cast, rules.adamw_then_cast(workload)),
    ]
