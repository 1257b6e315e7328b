"""Communication of a plan: agreement on errors, the amax reduction and the packed all-gather.

A group is a torch.distributed process group, or None for a world of one.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.layout import round_up
from zerofp4.shard import Shard, byte_range, find_gap, find_overlap

STAGING_ALIGNMENT = 16
PRESENT, FAILED, OTHER = 0, 1, 2
"""What a rank says in a gather: it takes part, it found an error, or it wants another gather."""


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to communicate in: the default one for None when torch.distributed is initialized.

    Raises ValueError when the calling process is not a member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("group was given, but torch.distributed is not initialized")
        return None
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(f"group does not contain the calling process (global rank {dist.get_rank()})")
    return group


class GroupReference:
    """A group that is not kept alive: its connections must close when the caller destroys it, not when the
    last plan goes, which may be as late as the interpreter's own end.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self._weak = None if group is None else weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup | None:
        """The group. Raises RuntimeError when it was destroyed."""
        if self._weak is None:
            return None
        group = self._weak()
        if group is None:
            raise RuntimeError("the process group that this was built for has been destroyed")
        return group

    def is_alive(self) -> bool:
        return self._weak is None or self._weak() is not None

    def refers_to(self, group: dist.ProcessGroup | None) -> bool:
        return (None if self._weak is None else self._weak()) is group


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def exchange(payload: Any, error: Exception | None, group: dist.ProcessGroup | None) -> list[Any]:
    """All-gather a picklable payload and agree on errors: the payloads in rank order.

    If any rank brings an error, every rank raises an exception of its kind whose message names the first such
    rank. Every rank must call it, with or without an error.
    """
    if group is None:
        if error is not None:
            raise error
        return [payload]
    rank, size = rank_and_size(group)
    kinds = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}
    kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "RuntimeError")
    # The kind's name and the text: an exception itself may not survive pickling.
    mine = (payload, None if error is None else (kind, str(error)))
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine, group=group)
    for other, (_, failure) in enumerate(gathered):
        if failure is not None:
            kind, message = failure
            raise kinds[kind](f"rank {other}: {message}") from (error if other == rank else None)
    return [value for value, _ in gathered]


def reduce_max(vector: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """MAX all-reduce in place."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)


def all_gather_slices(
    flat: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """All-gather in place: on entry a rank's own equal slice is valid, afterwards all slices are."""
    rank, size = rank_and_size(group)
    # torch 2.13 renamed both collectives and warns of the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(flat, flat.chunk(size)[rank], group=group, async_op=async_op)


def reduce_scatter_slices(
    output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """output = the sum over the ranks of this rank's equal slice of `flat`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, flat, group=group, async_op=async_op)


def check_ownership(names: Sequence[str], numels: Sequence[int], shards: Sequence[Sequence[Shard]]) -> None:
    """Raises ValueError unless the shards [rank][weight] cover every weight exactly once."""
    for i, (name, numel) in enumerate(zip(names, numels, strict=True)):
        check_disjoint(name, [of_rank[i] for of_rank in shards])
        gap = find_gap([of_rank[i] for of_rank in shards], numel)
        if gap is not None:
            raise ValueError(f"{name}: elements {gap[0]}..{gap[1] - 1} of {numel} are owned by no rank")


def check_disjoint(name: str, shards: Sequence[Shard]) -> None:
    """Raises ValueError when two ranks own the same element of a weight."""
    overlap = find_overlap(shards)
    if overlap is not None:
        a, b, first, last = overlap
        raise ValueError(f"{name}: ranks {a} and {b} both own elements {first}..{last - 1}")


class PackedGather:
    """Gathers packed codes in place: every rank's shard of every weight to every rank, in one collective.

    The shards [rank][weight] must cover every weight exactly once, at any offset. Each rank packs the bytes
    it has a code in into its slot of a staging buffer, which is padded to the longest; a byte at an odd
    boundary comes from two ranks, a nibble from each. Buffers are uint8 [M, K/2], one per weight.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        shards: Sequence[Sequence[Shard]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self.group = GroupReference(group)
        self.rank, self.size = rank_and_size(group)
        self.shards = shards
        self.offsets, lengths = [], []
        for of_rank in shards:
            # The first bytes of a slot say whether its rank found an error.
            offsets, length = [], STAGING_ALIGNMENT
            for shard in of_rank:
                first, last = byte_range(shard)
                offsets.append(length)
                length += last - first
            self.offsets.append(offsets)
            lengths.append(length)
        slot = round_up(max(lengths), STAGING_ALIGNMENT)
        self.staging = torch.zeros(self.size, slot, dtype=torch.uint8, device=device)
        self._boundaries = self._find_boundaries(slot, device)
        self.bind(buffers)

    def bind_if_moved(self, buffers: Sequence[torch.Tensor]) -> None:
        if [buffer.data_ptr() for buffer in buffers] != self.pointers:
            self.bind(buffers)

    def bind(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take the weights' codes from and to these buffers from now on."""
        self.pointers = [buffer.data_ptr() for buffer in buffers]
        self._own, self._sent, self._received, self._written = [], [], [], []
        for rank, of_rank in enumerate(self.shards):
            for buffer, shard, offset in zip(buffers, of_rank, self.offsets[rank], strict=True):
                if shard.numel:
                    self._bind_shard(rank, buffer.view(-1), shard, self.staging[rank, offset:])

    def _bind_shard(self, rank: int, codes: torch.Tensor, shard: Shard, slot: torch.Tensor) -> None:
        first, last = byte_range(shard)
        if rank == self.rank:
            self._own.append(codes[first:last])
            self._sent.append(slot[: last - first])
        # An odd end is completed by the next shard; of our own bytes only an odd start is news to us.
        last = shard.end // 2 if rank != self.rank else first + shard.start % 2
        if last > first:
            self._written.append(codes[first:last])
            self._received.append(slot[: last - first])

    def _find_boundaries(self, slot: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Staging positions of the bytes that hold the low and the high code at every odd boundary."""
        low, high = [], []
        for i in range(len(self.shards[0])):
            owners = sorted(
                (of_rank[i], rank) for rank, of_rank in enumerate(self.shards) if of_rank[i].numel
            )
            for (before, a), (_, b) in itertools.pairwise(owners):
                if before.end % 2:
                    first, last = byte_range(before)
                    low.append(a * slot + self.offsets[a][i] + last - first - 1)
                    high.append(b * slot + self.offsets[b][i])
        if not low:
            return None
        return torch.tensor(low, device=device), torch.tensor(high, device=device)

    def run(self, state: int = PRESENT, error: Exception | None = None) -> bool:
        """Gather. Every rank of the group must call it; False when all came only to say that they want
        another gather (OTHER).

        A rank that brings an error raises it. Where one did, or only some ranks want another gather, all
        others raise RuntimeError, and none has changed a weight. The states are read back on the host.
        """
        state = state if error is None else FAILED
        if self.size > 1:
            mine = self.staging[self.rank]
            mine[0] = state
            if state == PRESENT and self._own:
                torch._foreach_copy_(self._sent, self._own)
            all_gather_slices(self.staging.view(-1), self.group())
        if error is not None:
            raise error
        states = self.staging[:, 0].tolist() if self.size > 1 else [state]
        if FAILED in states:
            raise RuntimeError(f"rank {states.index(FAILED)} found an error; no rank changed a weight")
        if len(set(states)) > 1:
            raise RuntimeError(
                f"rank {states.index(OTHER)} owns other shards than before, rank {states.index(PRESENT)} the "
                "same; no rank changed a weight"
            )
        if state == PRESENT and self.size > 1:
            self._complete_boundaries()
            if self._written:
                torch._foreach_copy_(self._written, self._received)
        return state == PRESENT

    def _complete_boundaries(self) -> None:
        if self._boundaries is not None:
            low, high = self._boundaries
            flat = self.staging.view(-1)
            flat[high] = (flat[low] & 0x0F) | (flat[high] & 0xF0)
