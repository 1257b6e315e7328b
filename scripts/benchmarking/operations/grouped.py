"""Many matrices of one width that lie one below the other, each quantized with an amax of its own."""

import argparse
from functools import partial

import torch

import zerofp4
from benchmarking import rules
from benchmarking.operations.inputs import ACTIVATION, Input, make_input
from benchmarking.operations.quantize import RHT, time_quantize
from benchmarking.session import Session
from benchmarking.workloads import chosen, shape_name


def grouped(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.quantize_grouped of 64 matrices beside zerofp4.quantize of one that is as large as all."""
    for workload in chosen(options):
        m_splits = [piece.shape[0] for piece in workload.pieces]
        given = make_input(session, (sum(m_splits), workload.pieces[0].shape[1]))
        on_device = torch.tensor(m_splits, device=session.device)
        name, whole = workload.name, shape_name(given.x.shape)
        one = time_quantize(session, f"quantize_1d/{whole}", given, block=ACTIVATION)
        run = in_groups(given, on_device, block=ACTIVATION)
        ours = session.time(f"quantize_grouped/{name}", run, rules.counted_as(one))
        session.ratio(f"grouped_over_one/{name}", "ratio", ours, one)
        if session.clock.is_cuda:
            session.launches(f"launches/quantize_grouped/{name}", run)
        run = in_groups(given, m_splits, block=ACTIVATION)
        session.time(f"quantize_grouped_host_splits/{name}", run, rules.counted_as(one))
        one = time_quantize(session, f"quantize_1d_rht/{whole}", given, **RHT)
        ours = session.time(
            f"quantize_grouped_rht/{name}", in_groups(given, on_device, **RHT), rules.counted_as(one)
        )
        session.ratio(f"grouped_rht_over_one/{name}", "ratio", ours, one)


def in_groups(given: Input, m_splits: torch.Tensor | list[int], **options) -> partial:
    """A call that gives every group the amaxes of all; it allocates what it returns."""
    names = given.amaxes if "hadamard" in options else ("amax",)
    amaxes = {name: given.amaxes[name].repeat(len(m_splits)) for name in names}
    return partial(zerofp4.quantize_grouped, given.x, m_splits, **amaxes, **options)
