"""NVFP4 to values."""

import argparse
from functools import partial

import torch

import zerofp4
from benchmarking import rules
from benchmarking.operations import peers
from benchmarking.operations.inputs import ACTIVATION, WEIGHT, values
from benchmarking.session import Session
from benchmarking.workloads import chosen
from zerofp4 import reference
from zerofp4.format import E4M3_MAX


def dequantize(session: Session, options: argparse.Namespace) -> None:
    """zerofp4::dequantize of either copy with compact and swizzled scales, and the reference of it."""
    for workload in chosen(options):
        x = values(session, workload.pieces[0].shape)
        for suffix, block in (("1d", ACTIVATION), ("2d", WEIGHT)):
            tensor = zerofp4.quantize(x, block=block, columnwise=True, scale_layouts=("swizzled",))
            ours = rows_of(session, f"dequantize_{suffix}", workload.name, tensor)
            if options.peers and block == ACTIVATION:
                arguments = (tensor.rowwise_data, tensor.rowwise_scale, tensor.amax, block[0], torch.bfloat16)
                peers.reference_compile(session, ours, peers.Part(reference.dequantize, arguments))


def rows_of(session: Session, operation: str, name: str, tensor: zerofp4.NVFP4Tensor) -> dict:
    """Rows of a tensor with both copies and both layouts; that of rowwise to bfloat16 is returned."""
    rowwise = (tensor.rowwise_data, tensor.rowwise_scale)
    swizzled = (tensor.rowwise_data, tensor.rowwise_scale_swizzled)
    columnwise = (tensor.columnwise_data, tensor.columnwise_scale)
    time = partial(time_dequantize, session, tensor)
    ours = time(f"{operation}/{name}", *rowwise)
    other = time(f"{operation}_swizzled/{name}", *swizzled, layout="swizzled")
    session.ratio(f"{operation}_swizzled_over_compact/{name}", "ratio", other, ours)
    time(f"{operation}_columnwise/{name}", *columnwise, columnwise=True)
    time(f"{operation}_fp32/{name}", *rowwise, dtype=torch.float32)
    return ours


def time_dequantize(
    session: Session,
    tensor: zerofp4.NVFP4Tensor,
    name: str,
    data: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "compact",
    columnwise: bool = False,
) -> dict:
    """A row of the operator: a tensor's dequantize() takes the rowwise copy and compact scales."""
    arguments = (data, scale, tensor.amax, tensor.block[0], dtype, layout, int(E4M3_MAX), columnwise)
    run = partial(torch.ops.zerofp4.dequantize, *arguments)
    return session.time(name, run, rules.dequantize(data, scale, run()))
