"""What our operations are compared with in the same process: a bf16 copy, and the reference in PyTorch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarking import rules
from benchmarking.rules import Moved
from benchmarking.session import Session
from benchmarking.workloads import Tensors
from zerofp4 import reference
from zerofp4.format import BLOCK, MXFP8_BLOCK

EXACT = {"emulate_precision_casts": True}
"""torch.compile's options without which a value that is rounded to bfloat16 on its way stays a float32."""


class Part(NamedTuple):
    """A function to be compiled, and what it is called with."""

    function: Callable[..., object]
    arguments: Sequence
    options: dict | None = None


def attempt(
    session: Session,
    name: str,
    ours: dict,
    make: Callable[[], Callable[[], object]],
    errors: type[Exception] = Exception,
    moved: Moved | None = None,
) -> dict | None:
    """Time what `make` returns beside our row, and count its bytes as those of that, or as `moved`. Where
    `make`, or a first call of what it returns, raises one of `errors`, say so instead; there is no row then.
    """
    try:
        run = make()
        run()
        session.clock.synchronize()  # an error of its kernels is its own, too
    except errors as error:
        reason = str(error).strip().partition("\n")[0]
        session.say(f"{name} is left out: {reason or type(error).__name__}")
        return None
    row = session.time(name, run, moved or rules.counted_as(ours))
    session.compare(ours, row)
    return row


def compiled(*parts: Part) -> Callable[[], object]:
    """A call of functions under torch.compile, one after the other."""
    torch.compiler.reset()  # or what was compiled for other sizes is compiled again for variable ones
    calls = [
        (torch.compile(function, dynamic=False, options=options), arguments)
        for function, arguments, options in parts
    ]
    return lambda: [function(*arguments) for function, arguments in calls]


def reference_compile(session: Session, ours: dict, *parts: Part) -> None:
    """Time the reference of our row under torch.compile. Left out for want of a C++ compiler, say."""
    attempt(session, f"reference_compile_{ours['name']}", ours, lambda: compiled(*parts), RuntimeError)


# A step of the cast


def bf16_copy(session: Session, tensors: Tensors, ours: dict) -> None:
    """What users do today: the flat FP32 masters rounded into a flat bf16 buffer."""
    workload = tensors.workload
    copy = torch.empty_like(tensors.flat, dtype=torch.bfloat16)
    name = f"bf16_copy/{workload.part_name}"
    theirs = session.time(name, lambda: copy.copy_(tensors.flat), rules.bf16_copy(workload))
    session.compare(ours, theirs)


def references(session: Session, tensors: Tensors, ours: dict) -> None:
    """The reference in PyTorch, eager and compiled, where the workload is one weight owned whole."""
    workload = tensors.workload
    (shape, shard), *others = workload.pieces
    if others or shard.numel != workload.elements:
        return
    master = tensors.flat.view(shape)
    eager = session.time(f"reference_eager_{ours['name']}", lambda: cast(master), rules.counted_as(ours))
    session.compare(ours, eager)
    reference_compile(session, ours, Part(cast, [master]))


def cast(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, rowwise scales and amax of a whole [M, K] master for a bfloat16 weight."""
    x = master.bfloat16()
    amax = reference.tensor_amax(x)
    return *quantize(x, amax, BLOCK), amax


# The reference of single operations, a copy at a time: torch.compile takes no more at once


def quantize(x: torch.Tensor, amax: torch.Tensor, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rowwise copy."""
    scale = reference.block_scale(reference.block_amax(x, block_rows), amax)
    return reference.pack(reference.encode(x, scale, amax, block_rows)), scale


def quantize_transformed(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the columnwise copy with the Hadamard transform, in blocks of 1x16."""
    return quantize(reference.hadamard_transform(x).t().contiguous(), amax, 1)


def swizzle(scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Compact scales of 1x16 blocks of a [rows, cols] matrix."""
    return reference.swizzle_scale(reference.expand_scale(scale, rows, cols, 1))


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of the rowwise copy, and its scales as uint8: torch.compile has no E8M0 on a CPU."""
    scale = reference.mxfp8_scale(reference.mxfp8_block_amax(x)).view(torch.uint8)
    factor = reference.mxfp8_encode(scale).repeat_interleave(MXFP8_BLOCK, 1)[:, : x.shape[1]]
    return reference.float_to_e4m3(x.float() * factor), scale
