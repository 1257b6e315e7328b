"""Memory that the GPUs of one host share through NVLink, and the exchange of a bucket through it."""

import functools
import itertools
import math
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofp4 import ops
from zerofp4.distributed import (
    CollectiveError,
    GroupReference,
    OwnError,
    attempt,
    exchange,
    rank_and_size,
    timeout_seconds,
)
from zerofp4.engine.buckets import Bucket, GradientMemory, Gradients, gradient_memory, zeros_on
from zerofp4.engine.exchange import ABSTAIN, UPDATE_DTYPES, Abstain, Arrived, BucketExchange
from zerofp4.format import BLOCK
from zerofp4.ops import MAX_PEERS, Barrier, PeerRows, RankGradients

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets in the memory of other ranks, and their sources."""


def halves(copies: Copies) -> tuple[Copies, Copies]:
    """The first and the second halves of 1D copies: one copy engine does not fill NVLink."""
    first, second = [], []
    for target, source in copies:
        middle = source.numel() // 32 * 16
        first.append((target[:middle], source[:middle]))
        second.append((target[middle:], source[middle:]))
    return first, second


class Peers:
    """The ranks of a group, with memory that all of them read and write, and barriers of their GPUs.

    Building it is collective, and so is zeros(). A barrier makes the device wait, never the host, at most for
    the group's timeout. If a rank does not come by then, check() names it, `failed` (float32 [] on the
    device) becomes 1, and updates that read `failed` change nothing.

    The memory never moves, and is freed with the tensors of zeros() and their views.
    """

    rendezvous_count = 0
    """How often this process has made shared memory: the counter in torch's rendezvous keys. Ranks with
    different counts would wait for each other until the timeout.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = GroupReference(group), device
        self.rank, self.size = rank_and_size(group)
        self._ranks = dist.get_process_group_ranks(group)  # global ones, for messages
        # Multicast is for sums in the switch, and its objects have been seen to outlive their processes.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._handles: list[tuple[int, int, Any]] = []  # first and last address on this rank, torch's handle
        self.failed = torch.zeros((), dtype=torch.float32, device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._flags = self.zeros((2, self.size), torch.int32)
        arguments = self.rank, self._status, self.failed, timeout_seconds(group, device)
        self._arrivals, self._gathers = (Barrier(self.rows(flags), *arguments) for flags in self._flags)
        # Copies to other ranks run beside kernels, in two parts: one leaves while the other is computed.
        self._stream, self._other_stream = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._copies: dict[tuple[int, int, int], Copies] = {}

    @property
    def others(self) -> list[int]:
        """All ranks but this one, beginning with its neighbour, so that not all ranks write to one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shared memory, which torch.cuda's counts leave out."""
        return sum(last - first for first, last, _ in self._handles)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros of this shape on every rank, in memory that all can access. Collective, like its errors."""
        from torch.distributed._symmetric_memory import rendezvous

        tensor, error = attempt(_allocate, shape, dtype, self.device)
        exchange(None, error, self.group(), "allocating shared memory")
        Peers.rendezvous_count += 1
        handle = rendezvous(tensor, self.group().group_name)
        first = handle.buffer_ptrs[self.rank]
        self._handles.append((first, max(first, tensor.data_ptr() + tensor.nbytes), handle))
        return tensor

    def rows(self, own: torch.Tensor) -> tuple[int, ...]:
        """By rank, the address of its counterpart of `own`, a tensor in this rank's shared memory."""
        first, handle = self._find(own)
        return tuple(address + own.data_ptr() - first for address in handle.buffer_ptrs)

    def at(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        """Another rank's counterpart of `own`, a contiguous tensor in this rank's shared memory."""
        first, handle = self._find(own)
        return handle.get_buffer(rank, own.shape, own.dtype, (own.data_ptr() - first) // own.itemsize)

    def _find(self, own: torch.Tensor) -> tuple[int, Any]:
        address = own.data_ptr()
        found = [(first, handle) for first, last, handle in self._handles if first <= address <= last]
        return max(found, key=lambda one: one[0])  # an empty tensor may lie at the end of other memory

    def arrive(self) -> None:
        """A barrier on the current stream: work queued after it finds all ranks' work before it done."""
        self._arrivals.run()

    def open(self) -> None:
        """A barrier before gathers, after the kernels that each rank has queued to read old weights."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._gathers.run()

    def start_copies(self, first: Copies, second: Copies) -> torch.cuda.Event:
        """Begin to copy into the memory of other ranks, both lists at once, by the GPUs' copy engines, after
        the current stream and earlier copies and gathers. Returns the end of the copies.
        """
        self._follow()
        self._send(self._other_stream, first)
        self._send(self._stream, second)
        self._stream.wait_stream(self._other_stream)
        return self._stream.record_event()

    def start_sending(self, whole: torch.Tensor, count: int) -> None:
        """The beginning of start_gather(): the first `count` elements of the slice, as they are now."""
        self._follow()
        self._send(self._other_stream, self._copies_of(whole, 0, count))

    def start_gather(self, whole: torch.Tensor, sent: int = 0) -> torch.cuda.Event:
        """Begin to send this rank's slice of `whole`, 1D in shared memory, to all ranks, but for elements
        that start_sending() has `sent`. Returns an event after the slices of all ranks.
        """
        if sent == 0:
            sent = whole.numel() // self.size // 32 * 16
            self.start_sending(whole, sent)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._send(self._stream, self._copies_of(whole, sent, whole.numel() // self.size))
        self._stream.wait_stream(self._other_stream)
        with torch.cuda.stream(self._stream):
            self._gathers.run()
        return self._stream.record_event()

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._other_stream.wait_stream(self._stream)  # after open(), too

    def _send(self, stream: torch.cuda.Stream, copies: Copies) -> None:
        with torch.cuda.stream(stream):
            for target, own in copies:
                target.copy_(own, non_blocking=True)

    def _copies_of(self, whole: torch.Tensor, first: int, last: int) -> Copies:
        """Copies of these elements of this rank's slice to each other rank."""
        key = whole.data_ptr(), first, last
        if key not in self._copies:
            mine = whole.chunk(self.size)[self.rank][first:last]
            self._copies[key] = [(self.at(r, mine), mine) for r in self.others]
        return self._copies[key]

    def check(self) -> None:
        """Raise RuntimeError if a barrier has failed so far. Waits for nothing."""
        missing = int(self._status[0])
        if missing:
            raise RuntimeError(
                f"rank {self._ranks[missing - 1]} did not come to a barrier of the GPUs within the process "
                "group's timeout: it has died, was stopped or is elsewhere. Weights of this rank may be of "
                "two steps, and its optimizer is of no more use: build it anew and load a checkpoint"
            )


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    tensor = _SymmetricMemory.empty_strided_p2p(tuple(shape), strides, dtype, device).zero_()
    torch.cuda.synchronize(device)  # before others write there
    return tensor


# The exchange of a bucket


class PeerExchange(BucketExchange):
    """The owner of a slice reads the gradients of all ranks as it adds them up in FP32, in rank order. Copy
    engines write its codes into the weights of every rank.

    send() brings this rank's gradients into its shared memory, where they usually lie since the backward
    pass. receive(), average() and finish() are a barrier on the device, after the send() of all ranks.

    [Note: when shared memory may be written]

        turn      t             t + 1         t + 2         t + 3
        send      bucket t      t + 1         t + 2         t + 3
        barrier   t - 1         t             t + 1         t + 2
        read      t - 1         t             t + 1         t + 2

    - After the barrier of bucket t + 1 no rank reads bucket t any more, and before it no rank has sent bucket
      t + 3. So buckets may share three slots.
    - After the last bucket the gathers of weights end in a barrier, or clip_grad_norm_ in an all-reduce: then
      the next backward pass may write.

    means: float32 memory that buckets share, for receive() to average into; None if the update averages.
    """

    def __init__(
        self, bucket: Bucket, memory: GradientMemory, peers: Peers, means: torch.Tensor | None = None
    ):
        self.bucket, self.memory, self._peers = bucket, memory, peers
        self.gradient_bytes = bucket.bytes_to_others
        self.arrives_as = bucket.sent_as if bucket.sent_as in UPDATE_DTYPES else None
        self._means = None if means is None else means[: bucket.slice_numel]
        if self._means is not None:
            self.arrives_as, self._mean_views = torch.float32, bucket.own_views(self._means)
        self.error = OwnError()
        self._sent_halfway = 0  # elements of the slice of weights that left halfway through its cast
        self._half = find_halfway(bucket)
        self._connect()

    @property
    def halfway(self) -> tuple[int, int, Callable[[], None]] | None:
        """Made for each cast: an attribute with a method of this object would keep the object alive."""
        if self._half is None:
            return None
        position, row, count = self._half
        return position, row, functools.partial(self._send_weights, count)

    def _connect(self) -> None:
        """Find the rows to read: `_rows` of all ranks, and `_own_views` of this rank's."""
        own = self.memory.flat[self._peers.rank]
        self._rows = PeerRows(self._peers.rows(own), own.numel(), own.dtype)
        self._own_views = self.bucket.own_views(own)

    def send(self, gradients: Gradients | Abstain) -> None:
        self.error = OwnError()
        if gradients is not ABSTAIN:
            with self.error:
                self.memory.take(gradients)

    def finish(self) -> None:
        self._peers.arrive()

    def receive(self) -> Arrived:
        self.finish()
        self.error.raise_if_any()
        if self._means is not None:
            ops.average(self._rows, self._means)
            return Arrived(self._mean_views, None)
        rows = RankGradients(self._rows, self.bucket.masters, self._peers.rank)
        return Arrived(self._own_views, rows)

    def average(self, means: torch.Tensor, squares: torch.Tensor | None = None) -> None:
        self.finish()
        self.error.raise_if_any()
        ops.average(self._rows, means, squares=squares)

    def _send_weights(self, count: int) -> None:
        self._sent_halfway = count
        self._peers.start_sending(self.bucket.weights, count)

    def gather(self) -> torch.cuda.Event:
        scales, sent = self.bucket.scales, self._sent_halfway
        self._sent_halfway = 0
        if scales is not None:
            self._peers.start_sending(scales.view(-1), scales.shape[1])
        return self._peers.start_gather(self.bucket.weights, sent)


class PushExchange(PeerExchange):
    """In a backward pass send() has copy engines write to every owner its slice of the gradients.

    Besides p.grad this needs memory on each owner for the rows of the other ranks, for all buckets at once,
    in the dtype of sent gradients.

    [Note: writing into another rank's memory without asking]
    - Each row has one writer, which copies in order: sending again overwrites the earlier copy, also after
      zero_grad() or a skipped step.
    - Rows are read after the barrier of receive(), before which all copies have arrived. The next copies
      leave after the gathers of weights, or the all-reduce of clip_grad_norm_.
    - Own memory lives as long as this object. If a later pass overwrites it under a copy, the copied
      gradients are dropped ones. A slot waits until its copies have left.

    left: by the address of own memory, the last copies from there, which all buckets share.
    """

    def __init__(
        self, bucket: Bucket, memory: GradientMemory, peers: Peers, left: dict[int, torch.cuda.Event]
    ):
        self._left = left
        super().__init__(bucket, memory, peers)

    def _connect(self) -> None:
        """Make rows for the gradients of other ranks, and for this rank's own if its memory is a slot."""
        peers, memory = self._peers, self.memory
        received = peers.zeros((peers.size - memory.aliased, self.bucket.slice_numel), memory.flat.dtype)

        def row(sender: int, receiver: int) -> torch.Tensor:
            return received[(sender - receiver - 1) % peers.size]  # the last one is the receiver's own

        copies = [(peers.at(r, row(peers.rank, r)), memory.flat[r]) for r in peers.others]
        own = memory.flat[peers.rank]
        if not memory.aliased:
            copies.append((row(peers.rank, peers.rank), own))
            own = row(peers.rank, peers.rank)
        rows = [own if r == peers.rank else row(r, peers.rank) for r in range(peers.size)]
        addresses = tuple(r.data_ptr() for r in rows)
        self._rows = PeerRows(addresses, self.bucket.slice_numel, received.dtype)
        self._own_views, self.received = self.bucket.own_views(own), received
        self._copies: tuple[Copies, Copies] = halves(copies)

    def send(self, gradients: Gradients | Abstain) -> None:
        if gradients is ABSTAIN:
            return
        place = self.memory.flat.data_ptr()
        if place in self._left and not self.memory.aliased:
            self._left[place].wait()
        super().send(gradients)
        if not self.error:
            self._left[place] = self._peers.start_copies(*self._copies)

    def finish(self) -> None:
        place = self.memory.flat.data_ptr()
        if place in self._left:
            self._left[place].wait()
        super().finish()


def peer_exchanges(
    buckets: Sequence[Bucket], peers: Peers, *, early: bool = False, in_turns: bool = False
) -> list[BucketExchange]:
    """By bucket, an exchange through memory of these ranks.

    early: whether a backward pass sends gradients. in_turns: whether buckets share slots, instead of p.grad.
    """
    if early:
        memory, error = attempt(gradient_memory, buckets, zeros_on(peers.device), 2)
        exchange(None, error, peers.group(), "allocating gradients")
        left: dict[int, torch.cuda.Event] = {}
        return [PushExchange(bucket, own, peers, left) for bucket, own in zip(buckets, memory, strict=True)]
    memory = gradient_memory(buckets, peers.zeros, 3 if in_turns else None, aliased=not in_turns)
    # Updates of compact state have few loads on their way at a time: on four GPUs they would wait for rows of
    # one rank after the other.
    reads_means = {b: peers.size > 2 and b.state != "full" for b in buckets}
    most = max((b.slice_numel for b in buckets if reads_means[b]), default=0)
    means = peers.zeros((most,), torch.float32) if most else None
    pairs = zip(buckets, memory, strict=True)
    return [PeerExchange(b, own, peers, means if reads_means[b] else None) for b, own in pairs]


def find_halfway(bucket: Bucket) -> tuple[int, int, int] | None:
    """Where a cast may pause once, so that codes leave while the rest is cast. Codes that leave later share
    the link with gradients that an update reads, which costs a step of two H200s 4%.

    Returns the position of a weight, the last of its rows of tiles that begins in the first half of this
    rank's slice, and how many elements of the slice of `weights` come before it. If the middle is in the gap
    after a weight, its number of rows. None if there is no such row, or nothing is sent.
    """
    if not bucket.is_packed or bucket.world_size == 1:
        return None
    middle = bucket.begin + bucket.slice_numel // 2
    owned = [i for i, shard in enumerate(bucket.shards) if shard.numel and bucket.offsets[i] <= middle]
    if not owned:
        return None
    position = owned[-1]
    weight, offset = bucket.parameters[position], bucket.offsets[position]
    rows, cols = weight.record.matrix
    matrix, row = divmod(min(middle - offset, weight.numel()) // cols, rows)
    row = matrix * rows + row // BLOCK * BLOCK
    sent = offset + row * cols - bucket.begin
    return (position, row, sent // 2) if sent > 0 else None


# Which ranks are on one host, and whether they can share memory


def host_name() -> str:
    """The name and the boot of this host, or NCCL_HOSTID if it is set: NCCL tells hosts apart by it, too."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    return os.environ.get("NCCL_HOSTID") or name


def find_hosts(names: Sequence[str]) -> tuple[int, int] | None:
    """The numbers of hosts and of ranks on each; None unless each has as many, consecutive ones.

    names: host_name() of each rank.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(names)]
    is_regular = len(set(runs)) == 1 and len(set(names)) == len(runs)
    return (len(runs), runs[0]) if is_regular else None


def find_peers(
    transport: str, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Peers | None, str | None]:
    """(peers, None) if the ranks can share memory, else (None, reason). Collective.

    transport: "auto", "collective" or "peer", which raises ValueError on every rank if ranks cannot.
    """
    if rank_and_size(group)[1] == 1:
        return None, "a world of one has nobody to share memory with"
    if transport == "collective":
        return None, "it was asked for"
    locations = exchange(*attempt(locate, device), group, "comparing where ranks run")
    peers, obstacle = None, find_obstacle(locations)
    if obstacle is None:
        peers, error = attempt(Peers, group, device)
        try:  # a system may keep processes from each other's memory, as containers do
            exchange(None, error, group, "sharing memory")
        except CollectiveError:  # no rank is left that would wait
            raise
        except RuntimeError as failure:
            peers, obstacle = None, str(failure)
    if transport == "peer" and obstacle is not None:
        raise ValueError(f'transport="peer" is not available: {obstacle}; use "collective"')
    return peers, obstacle


class Location(NamedTuple):
    """Where a rank runs."""

    host: str  # host_name()
    index: int  # of its GPU; -1 without one
    reachable: list[int]  # indices of the GPUs whose memory its own can access
    obstacle: str | None  # why this rank cannot share memory with any other
    rendezvous_count: int = 0  # as of Peers


def locate(device: torch.device) -> Location:
    if device.type != "cuda":
        obstacle = f"the parameters are on {device}, and only GPUs read each other's memory"
        return Location(host_name(), -1, [], obstacle)
    from torch.distributed._symmetric_memory import get_backend

    index = torch.cuda.current_device() if device.index is None else device.index
    is_shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # as torch has it
    reachable = [
        other
        for other in range(torch.cuda.device_count())
        if (is_shared if other == index else torch.cuda.can_device_access_peer(index, other))
    ]
    backend = get_backend(device)
    obstacle = f"the backend of torch's symmetric memory is {backend!r}" if backend != "CUDA" else None
    return Location(host_name(), index, reachable, obstacle, Peers.rendezvous_count)


def find_obstacle(locations: Sequence[Location]) -> str | None:
    """Why these ranks cannot share memory; None if they can. locations: of all ranks."""
    if len(locations) > MAX_PEERS:
        return f"{len(locations)} ranks are more than {MAX_PEERS}"
    for rank, mine in enumerate(locations):
        if mine.obstacle is not None:
            return f"on rank {rank}: {mine.obstacle}"
        first, differs = locations[0], f"ranks 0 and {rank} differ"
        if mine.host != first.host:
            return f"{differs} ({first.host} and {mine.host}) in the host"
        if mine.rendezvous_count != first.rendezvous_count:
            return (
                f"{differs} ({first.rendezvous_count} and {mine.rendezvous_count}) in how often they have "
                "shared memory: build first what all share"
            )
    for (rank, mine), (other, theirs) in itertools.permutations(enumerate(locations), 2):
        if theirs.index not in mine.reachable:
            return (
                f"cuda:{mine.index} of rank {rank} cannot access the memory of cuda:{theirs.index} of rank "
                f"{other} (each rank needs another GPU, and has to see those of all)"
            )
    return None
