"""Compact scales to the order in which GEMMs read them, and back."""

import argparse
from functools import partial

import torch

import zerofp4
from benchmarking import rules
from benchmarking.operations import outside, peers
from benchmarking.session import Session
from benchmarking.workloads import Workload, chosen
from zerofp4.format import SCALE_DTYPE
from zerofp4.layout import scale_shape
from zerofp4.tensors.lists import ScaleOf


def swizzle(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.swizzle_scales and unswizzle_scales, of one tensor and of many, beside a clone of them."""
    for workload in chosen(options):
        scales = random_scales(session, workload)
        ours = rearrangements(session, workload.name, scales)
        if len(scales) > 1:
            cost_of_a_list(session, workload.name, partial(zerofp4.swizzle_scales, scales))
        elif options.peers:
            (scale, matrix), *_ = scales
            peers.reference_compile(session, ours, peers.Part(peers.swizzle, (scale, *matrix)))
            outside.measure(session, ours, torchao=partial(outside.torchao_swizzle, scale))


def random_scales(session: Session, workload: Workload) -> list[ScaleOf]:
    """Compact scales of 1x16 blocks of each weight."""
    torch.manual_seed(0)
    made = []
    for shape, _ in workload.pieces:
        scale = torch.randint(256, scale_shape(*shape, 1), dtype=torch.uint8, device=session.device)
        made.append((scale.view(SCALE_DTYPE), shape))
    return made


def rearrangements(session: Session, name: str, scales: list[ScaleOf]) -> dict:
    """Both ways, and a copy of as many bytes in one tensor; the row of the way there is returned."""
    swizzled = zerofp4.swizzle_scales(scales)
    moved = rules.rearrange([scale for scale, _ in scales], swizzled)
    ours = session.time(f"swizzle/{name}", partial(zerofp4.swizzle_scales, scales), moved)
    pairs = [(scale, matrix) for scale, (_, matrix) in zip(swizzled, scales, strict=True)]
    back = partial(zerofp4.unswizzle_scales, pairs, block=(1, 16))
    session.time(f"unswizzle/{name}", back, moved)
    flat = torch.cat([scale.view(torch.uint8).flatten() for scale, _ in scales])
    clone = session.time(f"clone/{name}", flat.clone, rules.rearrange([flat], [flat]))
    session.compare(ours, clone)
    session.ratio(f"swizzle_over_clone/{name}", "ratio", ours, clone)
    return ours


def cost_of_a_list(session: Session, name: str, run: partial) -> None:
    """What the GPU's time does not show of a call with many tensors."""
    session.count(f"host_swizzle/{name}", "host_us", session.clock.host_us(run), "zerofp4.swizzle_scales")
    if session.clock.is_cuda:
        session.launches(f"launches/swizzle/{name}", run)
