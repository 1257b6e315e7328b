"""Which parameters lie in which bucket."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4.distributed import rank_and_size
from zerofp4.engine.flat import DenseBuffer, FlatBuffer, PackedBuffer
from zerofp4.engine.wire import Wire
from zerofp4.tensors import NVFP4Tensor


def in_buckets(sizes: Sequence[int], together: Sequence[int], most: int) -> list[list[int]]:
    """Positions in buckets of at most `most` in all: neighbours, but that positions with the same number in
    `together` are never parted, and come where the first of them is. What is larger alone has its own bucket.
    """
    members: dict[int, list[int]] = {}
    for i, number in enumerate(together):
        members.setdefault(number, []).append(i)
    buckets: list[list[int]] = []
    left = 0
    for positions in members.values():
        size = sum(sizes[i] for i in positions)
        if not buckets or size > left:
            buckets.append([])
            left = most
        buckets[-1] += positions
        left -= size
    return buckets


def build_buffers(
    parameters: Sequence[torch.Tensor],
    together: Sequence[int],
    group: dist.ProcessGroup | None,
    wire: Wire,
) -> list[FlatBuffer]:
    """A buffer for each bucket of NVFP4 weights, then of parameters of each dtype, always in the same order.

    together: by parameter, the number of its amax group, which lies in one bucket. In a world of one nothing
    travels, and each kind has one bucket.
    """
    kinds: dict[object, list[int]] = {"nvfp4": [], torch.bfloat16: [], torch.float16: [], torch.float32: []}
    for i, parameter in enumerate(parameters):
        kinds["nvfp4" if isinstance(parameter, NVFP4Tensor) else parameter.dtype].append(i)
    buffers = []
    for kind, indices in kinds.items():
        sizes = [wire.nbytes(parameters[i]) for i in indices]
        most = wire.bucket_bytes if rank_and_size(group)[1] > 1 else sum(sizes)
        for positions in in_buckets(sizes, [together[i] for i in indices], most):
            chosen = [indices[position] for position in positions]
            kind_of_buffer = PackedBuffer if kind == "nvfp4" else DenseBuffer
            buffers.append(kind_of_buffer(chosen, [parameters[i] for i in chosen], group))
    return buffers
