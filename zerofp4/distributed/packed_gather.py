"""The all-gather of packed codes from arbitrary shards."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4.distributed.collectives import GroupReference, all_gather_slices, rank_and_size
from zerofp4.layout import round_up
from zerofp4.shard import Shard, byte_range

STAGING_ALIGNMENT = 16
PRESENT, FAILED, OTHER = 0, 1, 2
"""What a rank says in a gather: it takes part, it found an error, or it wants another gather."""


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
