"""MXFP8: quantization and back."""

import argparse
from functools import partial

import torch

import zerofp4
from benchmarking import rules
from benchmarking.operations import outside, peers
from benchmarking.operations.inputs import values
from benchmarking.session import Session
from benchmarking.workloads import chosen
from zerofp4 import reference


def mxfp8(session: Session, options: argparse.Namespace) -> None:
    """zerofp4.quantize_mxfp8 and the way back, rowwise and columnwise, beside the reference and torchao."""
    for workload in chosen(options):
        x, name = values(session, workload.pieces[0].shape), workload.name
        ours = time_quantize(session, f"quantize_mxfp8/{name}", x)
        swizzled = {"scale_layouts": ("swizzled",)}
        time_quantize(session, f"quantize_mxfp8_two_layouts/{name}", x, **swizzled)
        time_quantize(session, f"quantize_mxfp8_columnwise/{name}", x, rowwise=False, columnwise=True)
        time_quantize(session, f"quantize_mxfp8_both/{name}", x, columnwise=True)
        if options.peers:
            peers.reference_compile(session, ours, peers.Part(peers.quantize_mxfp8, (x,)))
            outside.measure(session, ours, torchao=partial(outside.torchao_quantize_mxfp8, x))
        dequantize(session, name, zerofp4.quantize_mxfp8(x, columnwise=True), options.peers)


def time_quantize(session: Session, name: str, x: torch.Tensor, **options) -> dict:
    """A row of zerofp4.quantize_mxfp8 into a tensor that is there."""
    out = zerofp4.quantize_mxfp8(x, **options)
    run = partial(zerofp4.quantize_mxfp8, x, **options, out=out)
    return session.time(name, run, rules.quantize(x, out))


def dequantize(session: Session, name: str, tensor: zerofp4.MXFP8Tensor, with_peers: bool) -> None:
    """Both copies to bfloat16."""
    rows = {}
    for side in ("rowwise", "columnwise"):
        data, scale = getattr(tensor, f"{side}_data"), getattr(tensor, f"{side}_scale")
        arguments = (data, scale, side == "columnwise", "compact", torch.bfloat16)
        run = partial(torch.ops.zerofp4.dequantize_mxfp8, *arguments)
        suffix = "" if side == "rowwise" else "_columnwise"
        moved = rules.dequantize(data, scale, run())
        rows[side] = session.time(f"dequantize_mxfp8{suffix}/{name}", run, moved)
    if with_peers:
        data, scale, ours = tensor.rowwise_data, tensor.rowwise_scale, rows["rowwise"]
        arguments = (data, scale.view(torch.uint8), False, torch.bfloat16)
        peers.reference_compile(session, ours, peers.Part(reference.dequantize_mxfp8, arguments))
        make = partial(outside.torchao_dequantize_mxfp8, data, scale, torch.bfloat16)
        outside.measure(session, ours, torchao=make)
