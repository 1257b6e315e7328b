"""The columnwise copies of a list of weights."""

import argparse

from benchmarking import rules
from benchmarking.session import Session
from benchmarking.workloads import Tensors, chosen


def transpose(session: Session, options: argparse.Namespace) -> None:
    """CastPlan.post(): the packed transposes of all weights."""
    for workload in chosen(options):
        plan = Tensors(workload, session.device).plan()
        session.time(f"transpose/{workload.name}", plan.post, rules.transpose(workload))
