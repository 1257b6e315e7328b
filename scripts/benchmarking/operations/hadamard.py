"""The Hadamard transform, which is part of two operations and none alone, beside ways to have it alone."""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarking import rules
from benchmarking.operations import peers
from benchmarking.operations.inputs import make_input
from benchmarking.operations.quantize import RHT, amaxes, time_quantize
from benchmarking.session import Session
from benchmarking.workloads import chosen
from zerofp4 import reference
from zerofp4.format import BLOCK

MATMUL_GROUPS = 8
"""16 x 16 transforms on the diagonal of the matrix that tensor cores multiply with."""


def hadamard(session: Session, options: argparse.Namespace) -> None:
    """The pass for the amax of the transform, and quantization with it; the transform alone by others."""
    for workload in chosen(options):
        given, name = make_input(session, workload.pieces[0].shape), workload.name
        ours = amaxes(session, name, given)
        time_quantize(session, f"quantize_1d_rht/{name}", given, **RHT)
        if options.peers:
            moved = rules.elementwise(given.x, given.x)
            part = peers.Part(reference.hadamard_transform, (given.x,), peers.EXACT)
            make = partial(peers.compiled, part)
            peers.attempt(session, f"reference_compile_transform/{name}", ours, make, RuntimeError, moved)
            make = partial(block_diagonal, given.x)
            peers.attempt(session, f"matmul_block_diagonal/{name}", ours, make, RuntimeError, moved)


def block_diagonal(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The transform along the rows of x as one matmul. Raises RuntimeError where the matrix does not divide x
    into whole rows.
    """
    matrix = transform_matrix(x.device)
    groups = x.view(-1, len(matrix))
    return partial(torch.mm, groups, matrix, out=torch.empty_like(groups))


def transform_matrix(device: torch.device) -> torch.Tensor:
    """bfloat16 [128, 128]: x @ this is the transform of every 16 columns of x. Its values are exact."""
    one = reference.hadamard_transform(torch.eye(BLOCK, device=device)).t()
    return torch.block_diag(*[one] * MATMUL_GROUPS)
