"""The local step of a cast, whole and by stages, and what others do in its place."""

import argparse

from benchmarking import rules
from benchmarking.operations import peers
from benchmarking.session import Session
from benchmarking.workloads import Tensors, Workload, chosen
from zerofp4 import CastPlan


def local_step(session: Session, options: argparse.Namespace) -> None:
    """CastPlan.step() of a world of one, each stage of it, and peers."""
    for workload in chosen(options):
        tensors = Tensors(workload, session.device)
        plan = tensors.plan()
        name = workload.part_name
        ours = session.time(f"local_step/{name}", plan.step, rules.local_step(workload))
        for stage in ("begin", "amax", "scale", "cast"):
            time_stage(session, plan, workload, stage)
        if options.peers:
            peers.bf16_copy(session, tensors, ours)
            peers.references(session, tensors, ours)


def amax(session: Session, options: argparse.Namespace) -> None:
    """Tile amaxes and amaxes of the owned elements."""
    time_one_stage(session, options, "amax")


def scale(session: Session, options: argparse.Namespace) -> None:
    """Every scale buffer of every weight from the amaxes."""
    time_one_stage(session, options, "scale")


def cast(session: Session, options: argparse.Namespace) -> None:
    """Codes of the owned elements."""
    time_one_stage(session, options, "cast")


def time_one_stage(session: Session, options: argparse.Namespace, stage: str) -> None:
    for workload in chosen(options):
        plan = Tensors(workload, session.device).plan()
        plan.step()
        time_stage(session, plan, workload, stage)


def time_stage(session: Session, plan: CastPlan, workload: Workload, stage: str) -> None:
    """A stage alone, which a plan has no public method for.

    Amaxes are a maximum with what the vector holds: it is cleared before each run, or nothing would be
    written. scale and cast need a vector that amax has filled.
    """
    stages = plan._stages
    moved = getattr(rules, stage)(workload)
    before = stages.begin if stage == "amax" else None
    session.time(f"{stage}/{workload.part_name}", getattr(stages, stage), moved, before=before)
