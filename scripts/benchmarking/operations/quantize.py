"""NVFP4 quantization by block, copies, scale layouts and rounding, with amaxes given; the amax pass alone."""

import argparse
from collections.abc import Callable
from functools import partial

import torch

import zerofp4
from benchmarking import rules
from benchmarking.operations import outside, peers
from benchmarking.operations.inputs import (
    ACTIVATION,
    WEIGHT,
    Input,
    amax_pass,
    make_input,
    without_compact_scales,
)
from benchmarking.operations.peers import Part
from benchmarking.session import Session
from benchmarking.workloads import chosen, shape_name
from zerofp4.layout import columnwise_rows
from zerofp4.ops import quantize_into

RHT = {"block": ACTIVATION, "columnwise": True, "hadamard": True}


def quantize(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.quantize with amaxes given, the amax pass, quantize_dequantize, and what others do."""
    for workload in chosen(options):
        if len(workload.pieces) > 1:
            for shape, _ in workload.pieces:
                hadamard(session, shape_name(shape), make_input(session, shape))
            continue
        given = make_input(session, workload.pieces[0].shape)
        rows = blocks(session, workload.name, given)
        rows |= hadamard(session, workload.name, given)
        amaxes(session, workload.name, given)
        rows |= roundings(session, workload.name, given)
        if options.peers:
            others(session, given, rows)


def time_quantize(session: Session, name: str, given: Input, **options) -> dict:
    """A row of zerofp4.quantize into a tensor that is there."""
    amaxes = given.amaxes if "hadamard" in options else {"amax": given.amax}
    out = zerofp4.quantize(given.x, **amaxes, **options)
    run = partial(zerofp4.quantize, given.x, **amaxes, **options, out=out)
    return session.time(name, run, rules.quantize(given.x, out))


def blocks(session: Session, name: str, given: Input) -> dict[str, dict]:
    """Rows by operation: blocks of either shape, one copy and both."""
    rows = {}
    for suffix, block in (("1d", ACTIVATION), ("2d", WEIGHT)):
        for operation, columnwise in ((f"quantize_{suffix}", False), (f"quantize_{suffix}_both", True)):
            options = {"block": block, "columnwise": columnwise}
            rows[operation] = time_quantize(session, f"{operation}/{name}", given, **options)
    return rows


def hadamard(session: Session, name: str, given: Input) -> dict[str, dict]:
    """Rows by operation: rowwise, and columnwise with the transform; scales as they are, swizzled in the same
    pass, and swizzled after it.
    """
    compact = time_quantize(session, f"quantize_1d_rht/{name}", given, **RHT)
    two_layouts = f"quantize_1d_rht_two_layouts/{name}"
    time_quantize(session, two_layouts, given, **RHT, scale_layouts=("swizzled",))
    out = without_compact_scales(zerofp4.quantize(given.x, **RHT, scale_layouts=("swizzled",)))
    run = partial(quantize_into, given.x, out.record, **given.amaxes)
    swizzled = session.time(f"quantize_1d_rht_swizzled/{name}", run, rules.quantize(given.x, out))
    session.ratio(f"rht_swizzled_over_compact/{name}", "ratio", swizzled, compact)
    run = quantize_then_swizzle(given)
    two_passes = session.time(f"quantize_1d_rht_then_swizzle/{name}", run, rules.counted_as(swizzled))
    session.ratio(f"rht_one_pass_over_two/{name}", "speedup", two_passes, swizzled)
    return {"quantize_1d_rht": compact, "quantize_1d_rht_swizzled": swizzled}


def quantize_then_swizzle(given: Input, *, reference_compile: bool = False) -> Callable[[], None]:
    """Compact scales, and then those of both copies swizzled: by one launch of ours, or by the compiled
    reference.
    """
    rows, cols = given.x.shape
    out = zerofp4.quantize(given.x, **RHT)
    scales = [
        (out.rowwise_scale, (rows, cols)),
        (out.columnwise_scale, (cols, columnwise_rows(rows, hadamard=True))),
    ]
    swizzle = partial(zerofp4.swizzle_scales, scales)
    if reference_compile:
        parts = (Part(peers.swizzle, (scale, *matrix)) for scale, matrix in scales)
        swizzle = peers.compiled(*parts)

    def run() -> None:
        zerofp4.quantize(given.x, **given.amaxes, **RHT, out=out)
        swizzle()

    return run


def amaxes(session: Session, name: str, given: Input) -> dict:
    """What quantize does first where no amax is given, without and with that of the transform, the row of
    which is returned.
    """
    amax, columnwise_amax = map(torch.empty_like, (given.amax, given.columnwise_amax))
    moved = rules.amax_pass(given.x)
    session.time(f"tensor_amax/{name}", partial(amax_pass, given.x, amax, None), moved)
    return session.time(f"amax_rht/{name}", partial(amax_pass, given.x, amax, columnwise_amax), moved)


def roundings(session: Session, name: str, given: Input) -> dict[str, dict]:
    """The other ways to values: stochastic rounding, a choice of scales, no codes at all. Returns the rows by
    operation of those that others have too.
    """
    rows = {}
    drawn = {"block": ACTIVATION, "stochastic_rounding": True}
    time_quantize(session, f"quantize_1d_stochastic/{name}", given, **drawn)
    for suffix, block in (("1d", ACTIVATION), ("2d", WEIGHT)):
        choice = {"block": block, "four_over_six": zerofp4.FourOverSix()}
        operation = f"quantize_{suffix}_four_over_six"
        rows[operation] = time_quantize(session, f"{operation}/{name}", given, **choice)
    run = partial(zerofp4.quantize_dequantize, given.x, block=ACTIVATION, amax=given.amax)
    session.time(f"quantize_dequantize/{name}", run, rules.elementwise(given.x, run()))
    return rows


def others(session: Session, given: Input, rows: dict[str, dict]) -> None:
    """The reference under torch.compile, and other packages where there are any."""
    x, amax = given.x, given.amax
    rowwise = Part(peers.quantize, (x, amax, 1))
    tiles = Part(peers.quantize, (x, amax, 16))
    transformed = Part(peers.quantize_transformed, (x, given.columnwise_amax), peers.EXACT)
    peers.reference_compile(session, rows["quantize_1d"], rowwise)
    peers.reference_compile(session, rows["quantize_2d"], tiles)
    peers.reference_compile(session, rows["quantize_1d_rht"], rowwise, transformed)
    swizzled = rows["quantize_1d_rht_swizzled"]
    make = partial(quantize_then_swizzle, given, reference_compile=True)
    peers.attempt(session, swizzled["name"].replace("swizzled", "then_reference_compile"), swizzled, make)
    outside.measure(
        session,
        rows["quantize_1d"],
        torchao=partial(outside.torchao_nvfp4, x, amax),
        gemlite=partial(outside.gemlite_nvfp4, x, amax),
        fouroversix=partial(outside.fouroversix_nvfp4, x, amax, 1),
    )
    outside.measure(session, rows["quantize_2d"], fouroversix=partial(outside.fouroversix_nvfp4, x, amax, 16))
    for operation, block_rows in (("quantize_1d_four_over_six", 1), ("quantize_2d_four_over_six", 16)):
        make = partial(outside.fouroversix_nvfp4, x, amax, block_rows, zerofp4.FourOverSix().error)
        outside.measure(session, rows[operation], fouroversix=make)
