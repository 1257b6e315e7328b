"""The all-gather of packed codes from arbitrary shards."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed.collectives import GroupReference, OwnError, all_gather_slices, rank_and_size
from zerofp4.layout import round_up
from zerofp4.shard import Shard, byte_range, find_gap, find_overlap


class PackedGather:
    """Gathers packed codes in place: every rank's shard of every weight to every rank, in one collective.

    The shards [rank][buffer] must cover every buffer exactly once, at any offset. Each rank packs the bytes
    it has a code in into its slot of a staging buffer; a byte at an odd boundary comes from two ranks.
    Buffers are contiguous uint8, two codes a byte; bytes that are no codes count as two.

    header: of the plan whose steps write the codes, for queue(). zeros: makes the staging buffer in memory of
    the caller, who gathers it between pack() and unpack().
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        shards: Sequence[Sequence[Shard]],
        group: dist.ProcessGroup | None,
        device: torch.device,
        header: ops.GatherHeader | None = None,
        zeros: Callable[[Sequence[int], torch.dtype], torch.Tensor] | None = None,
    ):
        self.group = GroupReference(group)
        self.rank, self.size = rank_and_size(group)
        self._shards = shards
        self._offsets, lengths = zip(*map(_offsets, shards), strict=True)
        shape = self.size, round_up(max(lengths), ops.GATHER_VECTOR)
        zeros = zeros or functools.partial(torch.zeros, device=device)
        self.staging = zeros(shape, dtype=torch.uint8)
        self._states = self.staging.view(torch.int32)[:, 0]
        self._low = self._find_low_codes()
        self._header = header
        self._stages = ops.NativePlan(device)
        self.bind(buffers)

    def _address(self, rank: int, i: int) -> int:
        """Of the first byte of a rank's run of weight i in the staging buffer."""
        return self.staging.data_ptr() + rank * self.staging.shape[1] + self._offsets[rank][i]

    def _find_low_codes(self) -> dict[tuple[int, int], int]:
        """By (rank, weight) of each shard with an odd start: where the other code of its first byte is."""
        low = {}
        for i in range(len(self._shards[0])):
            owners = sorted(
                (of_rank[i], rank) for rank, of_rank in enumerate(self._shards) if of_rank[i].numel
            )
            for (before, a), (_, b) in itertools.pairwise(owners):
                if before.end % 2:
                    first, last = byte_range(before)
                    low[b, i] = self._address(a, i) + last - first - 1
        return low

    def bind_if_moved(self, buffers: Sequence[torch.Tensor]) -> None:
        if [buffer.data_ptr() for buffer in buffers] != self._pointers:
            self.bind(buffers)

    def bind(self, buffers: Sequence[torch.Tensor]) -> None:
        """Gather from and to these buffers from now on. RuntimeError, with no change, during a capture."""
        pointers = ops.addresses_of("rowwise_data", buffers)
        if self.size > 1:
            own = [
                ops.GatherRun(pointers[i] + first, self._address(self.rank, i), 0, last - first)
                for i, (first, last) in enumerate(map(byte_range, self._shards[self.rank]))
                if last > first
            ]
            received = self._received(pointers)
            ops.load_gather(self._stages, self.staging, self.rank, self._header, own, received, buffers)
        self._pointers = pointers

    def _received(self, pointers: Sequence[int]) -> list[ops.GatherRun]:
        runs = []
        for rank, of_rank in enumerate(self._shards):
            for i, shard in enumerate(of_rank):
                # An odd end is completed by the next shard; of our own bytes only an odd start is news to us.
                first = shard.start // 2
                last = shard.end // 2 if rank != self.rank else first + shard.start % 2
                if shard.numel and last > first:
                    low = self._low.get((rank, i), 0)
                    runs.append(ops.GatherRun(self._address(rank, i), pointers[i] + first, low, last - first))
        return runs

    def pack(self) -> None:
        """This rank's shards into its slot of the staging buffer."""
        self._stages.run("pack", ops.GATHER_PRESENT)

    def unpack(self) -> None:
        """The other ranks' shards out of their slots."""
        self._stages.run("unpack")

    def queue(self, error: OwnError) -> None:
        """Gather, on every rank, without waiting for the device. A rank that brings an error raises it; then,
        or if the step before did not take place, no rank changes a weight, and the header's status says so.
        """
        self._exchange(ops.GATHER_FAILED if error else ops.GATHER_PRESENT)
        if not error:
            self.unpack()
        error.raise_if_any()

    def run(self, state: int = ops.GATHER_PRESENT, error: OwnError | None = None) -> bool:
        """Gather, on every rank; False if all ask for another gather (GATHER_OTHER). A rank that brings an
        error raises it; then, or if only some ask for another, all others raise RuntimeError.
        """
        state = ops.GATHER_FAILED if error else state
        self._exchange(state)
        if error:
            raise error.take()
        states = self._states.tolist() if self.size > 1 else [state]
        if ops.GATHER_FAILED in states:
            rank = states.index(ops.GATHER_FAILED)
            raise RuntimeError(f"rank {rank} found an error; no rank changed a weight")
        if len(set(states)) > 1:
            raise RuntimeError(
                f"rank {states.index(ops.GATHER_OTHER)} owns other shards than before, rank "
                f"{states.index(ops.GATHER_PRESENT)} the same; no rank changed a weight"
            )
        if state == ops.GATHER_PRESENT:
            self.unpack()
        return state == ops.GATHER_PRESENT

    def _exchange(self, state: int) -> None:
        if self.size > 1:
            self._stages.run("pack", state)
            all_gather_slices(self.staging.view(-1), self.group(), stage="gathering codes")


def _offsets(shards: Sequence[Shard]) -> tuple[list[int], int]:
    """Where a rank's runs lie in its slot, after its state, between vectors as in weights; and the end."""
    offsets, length = [], ops.GATHER_VECTOR
    for shard in shards:
        first, last = byte_range(shard)
        offsets.append(round_up(length, ops.GATHER_VECTOR) + first % ops.GATHER_VECTOR)
        length = offsets[-1] + last - first if shard.numel else length
    return offsets, length


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
