"""Buckets: which parameters share a flat buffer, how their gradients travel, and which rank owns a matrix
that must stay whole.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from zerofp4.distributed import rank_and_size
from zerofp4.engine.flat import DenseBuffer, FlatBuffer, PackedBuffer, Sharding
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.tensors import NVFP4Tensor

# How gradients travel

BUCKETS = 14
BUCKET_MB = 256.0, 1024.0
"""A model's gradients are cut into so many buckets, of at least and at most so many megabytes as they travel,
all ranks' parts together. On two H200s a bucket costs the host half a millisecond, in which 150 MB are
reduced, updated and published: smaller ones keep the device waiting, and in 64 of 256 MB the step of an 8B
model took a quarter longer than in 14 of 1024 MB.
"""


class Wire(NamedTuple):
    """How gradients travel.

    dtype: what they are rounded to before they are added; None is their own, as their parameters have it when
        the optimizer is built.
    bucket_mb: megabytes of one bucket, all ranks' parts together.
    made_in: the dtype of all gradients; None is what autograd makes them.
    """

    dtype: torch.dtype | None
    bucket_mb: float
    made_in: torch.dtype | None = None

    def dtype_of(self, parameters: Sequence[torch.Tensor]) -> torch.dtype:
        """What the gradients of a bucket travel as: where they have several dtypes, float32, which holds the
        values of all.
        """
        dtypes = self._made_in(parameters)
        return self.dtype or (dtypes.pop() if len(dtypes) == 1 else torch.float32)

    def keeps(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of all these travel as autograd makes them."""
        return self._made_in(parameters) == {self.dtype_of(parameters)}

    def _made_in(self, parameters: Sequence[torch.Tensor]) -> set[torch.dtype]:
        return {self.made_in or gradient_dtype(parameter) for parameter in parameters}

    def nbytes(self, parameter: torch.Tensor) -> int:
        """Of its gradient on its way, in a bucket where all gradients have its dtype."""
        return parameter.numel() * self.dtype_of([parameter]).itemsize


def make_wire(
    gradient_wire: torch.dtype | None,
    bucket_mb: float | None,
    parameters: Sequence[torch.Tensor] = (),
    made_in: torch.dtype | None = None,
) -> Wire:
    """parameters: what a bucket_mb of None is made for. made_in: as in Wire.

    Raises ValueError for arguments that cannot be meant.
    """
    if gradient_wire is not None and gradient_wire not in WEIGHT_DTYPES:
        raise ValueError(f"gradient_wire must be None or one of {WEIGHT_DTYPES}, got {gradient_wire!r}")
    wire = Wire(gradient_wire, math.nan, made_in)
    if bucket_mb is None:
        least, most = BUCKET_MB
        share = sum(map(wire.nbytes, parameters)) / 2**20 / BUCKETS
        return wire._replace(bucket_mb=min(max(share, least), most))
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb must be a positive number of megabytes, got {bucket_mb!r}")
    return wire._replace(bucket_mb=float(bucket_mb))


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What autograd makes its gradients: the parameter's own dtype, unless its grad_dtype says another or,
    being None, any; then float32.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(parameter, "grad_dtype", parameter.dtype) or torch.float32


def check_gradient_dtype(
    dtype: torch.dtype | None, parameters: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Raises ValueError unless gradients of these parameters can be made in `dtype`; changes nothing."""
    for parameter, name in zip(parameters, names, strict=True):
        if dtype in (None, gradient_dtype(parameter)):
            continue
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise ValueError(
                f"gradient_dtype={dtype}: torch {torch.__version__} gives {name} gradients of its own dtype, "
                f"{parameter.dtype}; later versions have grad_dtype, torch 2.11 for one"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"gradient_dtype={dtype}: {name} has a gradient of {parameter.grad.dtype} by now; call "
                "zero_grad() first"
            )


def set_gradient_dtype(dtype: torch.dtype | None, parameters: Sequence[torch.Tensor]) -> None:
    """From now on autograd makes and adds up the gradients of these parameters in `dtype`; None leaves them
    as they are.
    """
    for parameter in parameters:
        if dtype not in (None, gradient_dtype(parameter)):
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad_dtype = dtype


# Which parameters share a bucket


class Updated(NamedTuple):
    """How the master of a parameter is updated.

    by: the number of the optimizer that updates it. All parameters of a bucket have the same one.
    work: what an update costs, in any unit, if it needs whole matrices; None if it takes any slice.
    """

    by: int = 0
    work: int | None = None


def build_buffers(
    parameters: Sequence[torch.Tensor],
    together: Sequence[int],
    shardings: Sequence[Sharding],
    wire: Wire,
    updated: Sequence[Updated],
    as_made: bool,
    rounded_first: bool,
) -> list[FlatBuffer]:
    """Build one flat buffer per bucket, the same list on every rank.

    The parameters of a bucket share their sharding, their optimizer and their kind (NVFP4, or a dtype), and
    buffers are sorted by these three. In a group of one rank nothing travels: each combination is one bucket.

    together: by parameter, the number of its amax group, which must lie in one bucket.
    shardings, updated: by parameter.
    as_made: sort buffers as a backward pass is expected to make their gradients: NVFP4 weights of the last
        layers first. Dense buckets follow, since each spans many layers and, as a rule, the embedding.
    rounded_first: within a sharding, put NVFP4 weights last, so that a step waits for dense weights only.
    """
    kinds = ("nvfp4", torch.bfloat16, torch.float16, torch.float32)

    def key(i: int) -> tuple[bool, int, int]:
        is_packed = isinstance(parameters[i], NVFP4Tensor)
        kind = kinds.index("nvfp4" if is_packed else parameters[i].dtype)
        return rounded_first and is_packed, updated[i].by, kind

    buffers: list[FlatBuffer] = []
    for sharding, positions in _positions(shardings).items():
        world_size = rank_and_size(sharding.group)[1]
        works = {i: updated[i].work for i in positions if updated[i].work is not None}
        owners = dict(zip(works, longest_first([*works.values()], world_size), strict=True))
        for _, indices in itertools.groupby(sorted(positions, key=key), key):
            indices = list(indices)
            sizes = [wire.nbytes(parameters[i]) for i in indices]
            most = int(wire.bucket_mb * 2**20) if world_size > 1 else sum(sizes)
            numbers = [together[i] for i in indices]
            is_whole = indices[0] in owners
            if is_whole:
                buckets = in_whole_slices(sizes, [owners[i] for i in indices], numbers, most // world_size)
            else:
                buckets = in_buckets(sizes, numbers, most, first_last=as_made)
            for bucket in buckets:
                chosen = [indices[position] for position in bucket]
                members = [parameters[i] for i in chosen]
                kind = PackedBuffer if isinstance(members[0], NVFP4Tensor) else DenseBuffer
                with_ranks = [owners[i] for i in chosen] if is_whole else None
                buffers.append(kind(chosen, members, sharding, with_ranks))
    return sorted(buffers, key=lambda b: (b.kind != "nvfp4", -min(b.indices))) if as_made else buffers


def _positions(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """The positions of each key; keys in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found


def in_buckets(
    sizes: Sequence[int], together: Sequence[int], most: int, first_last: bool = False
) -> list[list[int]]:
    """Cut neighbouring positions into buckets of at most `most`; a larger position gets a bucket of its own.

    together: positions with the same number share a bucket, where the first of them is.
    first_last: the first bucket is sent last, with nothing left to hide its transfer. So if one bucket is not
        enough, each is at most half of the sum of itself and all before it, down to an eighth of `most`.
    """
    rest = sum(sizes)
    shrinks = first_last and rest > most
    buckets: list[list[list[int]]] = []
    room = 0
    for positions in list(_positions(together).values())[:: -1 if first_last else 1]:
        size = sum(sizes[i] for i in positions)
        if not buckets or size > room:
            buckets.append([])
            room = min(most, max(rest // 2, most // 8)) if shrinks else most
        buckets[-1].append(positions)
        room -= size
        rest -= size
    if first_last:
        buckets = [bucket[::-1] for bucket in reversed(buckets)]
    return [[i for positions in bucket for i in positions] for bucket in buckets]


# Whole matrices. The slices of a bucket are as long as the longest of them, so a rank that does not fill its
# slice wastes memory and bandwidth. Owners are chosen first, over all buckets, to balance the time of
# updates; then each bucket takes about equally much of every rank.


def longest_first(works: Sequence[int], world_size: int) -> list[int]:
    """Assign each job to a rank: longest job first, to the rank with the least work so far, ties by index."""
    loads, owners = [0] * world_size, [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += works[i]
    return owners


def in_whole_slices(
    sizes: Sequence[int], owners: Sequence[int], together: Sequence[int], room: int
) -> list[list[int]]:
    """Put each position into the first bucket where its owner's slice has room for it.

    together: positions with the same number share a bucket.
    room: of each rank in a bucket. What is larger opens a bucket whose slices are all that large.

    Returns the positions of each bucket, sorted by owner.
    """
    buckets: list[list[int]] = []
    rooms: list[int] = []
    filled: list[Counter[int]] = []  # by owner
    for positions in _positions(together).values():
        needed: Counter[int] = Counter()
        for i in positions:
            needed[owners[i]] += sizes[i]
        for b, most in enumerate(rooms):
            if all(filled[b][owner] + size <= most for owner, size in needed.items()):
                break
        else:
            b = len(buckets)
            buckets.append([])
            rooms.append(max(room, *needed.values()))
            filled.append(Counter())
        buckets[b] += positions
        filled[b] += needed
    return [sorted(positions, key=lambda i: (owners[i], i)) for positions in buckets]
