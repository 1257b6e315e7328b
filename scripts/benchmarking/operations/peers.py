"""What a step of the cast is compared with, on the same masters in the same process."""

from collections.abc import Iterator

import torch

from benchmarking import rules
from benchmarking.session import Session
from benchmarking.workloads import Tensors
from zerofp4 import reference
from zerofp4.format import BLOCK


def bf16_copy(session: Session, tensors: Tensors) -> dict:
    """What users do today: the flat FP32 masters rounded into a flat bf16 buffer."""
    workload = tensors.workload
    copy = torch.empty_like(tensors.flat, dtype=torch.bfloat16)
    name = f"bf16_copy/{workload.part_name}"
    return session.time(name, lambda: copy.copy_(tensors.flat), rules.bf16_copy(workload))


def references(session: Session, tensors: Tensors) -> Iterator[dict]:
    """The reference in PyTorch, eager and compiled, where the workload is one weight owned whole."""
    workload = tensors.workload
    (shape, shard), *others = workload.pieces
    if others or shard.numel != workload.elements:
        return
    master = tensors.flat.view(shape)
    moved = rules.local_step(workload)._replace(rule=f"counted as local_step/{workload.name}")
    yield session.time(f"reference_eager/{workload.name}", lambda: cast(master), moved)
    compiled = torch.compile(cast)
    try:
        compiled(master)
    except RuntimeError as error:  # for want of a C++ compiler or Triton, say
        session.say(f"reference_compile/{workload.name} is left out: {str(error).splitlines()[0]}")
        return
    yield session.time(f"reference_compile/{workload.name}", lambda: compiled(master), moved)


def cast(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, rowwise scales and amax of a whole [M, K] master for a bfloat16 weight."""
    x = master.bfloat16()
    amax = reference.magnitude(x).amax().reshape(1)
    scale = reference.block_scale(reference.block_amax(x, BLOCK), amax)
    return reference.pack(reference.encode(x, scale, amax, BLOCK)), scale, amax
