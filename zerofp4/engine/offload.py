"""Buckets whose masters and optimizer state are in host memory, where the CPU updates them to the same bytes.

To other ranks an offloaded bucket is like any other. Only its update and its cast are on the host:

    on the device                                                   on the host
    the mean of the gradients          -- gradients, skip, ... -->  update, which leaves amaxes
    one all-reduce of amaxes           <------ own amaxes --------
    scales                             ------ all amaxes -------->  cast
    gather of weights, transposes      <- codes (or values), scales that travel

Masters and state are never copied, so they are in ordinary memory. Copies go through pinned slots.

The thread that calls step() computes, with `Offload.threads`. In turn t of a step it begins to bring down
the gradients of bucket t, updates bucket t - 1, and casts bucket t - 2, whose codes go up while the next
bucket is updated. Meanwhile the GPU updates the other buckets, so choose() spreads offloaded ones evenly.

[Note: when a slot may be written] There are two Slots, and offloaded buckets take turns. Memory is free once
its last reader is done, and the host has waited for it if that is a copy:

    slot      written by                        read by                      free in
    means     the exchange, turn n              copy down, own stream        turn n + 1
    down      that copy                         update, turn n + 1           turn n + 2
    amaxes    update, turn n + 1; then a copy   copy up, current stream;     turn n + 3, after a wait
              of the reduced ones, turn n + 2   then cast, turn n + 2
    up        cast, turn n + 2                  copy up, current stream      turn n + 4, after a wait

[Note: what the host waits for] In a backward pass the device makes the gradients of bucket t while the host
updates bucket t - 1, if the host does not wait for work of turn t. On one rank it waits for copies of earlier
turns alone. On several ranks a cast also waits for the reduced amaxes, and so for the gradients of bucket t.

The host's kernels also read the decision of a step: `skip`, the presence flags and the factor of
clip_grad_norm_ come down with each bucket's gradients, since a failed barrier may set `skip` in between.

If the parameters are on a CPU, the same steps run without streams.
"""

import contextlib
import functools
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zerofp4 import ops
from zerofp4.cast import CastPlan, check_request, travelling_scales, travelling_shards
from zerofp4.distributed import OwnError, attempt
from zerofp4.engine.buckets import CHUNK, Bucket
from zerofp4.engine.exchange import Arrived, BucketExchange, Gradients, LocalExchange
from zerofp4.format import SCALE_DTYPE
from zerofp4.ops import HEADER_WORDS
from zerofp4.shard import Shard, byte_range
from zerofp4.storage import NVFP4Storage, Side, record_of
from zerofp4.tensors import INIT_VAL

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # targets and their sources

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")]
"""Of cgroups v2 and v1, as a container sees its own."""
USAGES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""The files beside these limits that say what is in use."""

KEPT_BYTES = {"full": 12.0, "compact": 6.125, "compact24": 5.125}
"""Of masters and their state per element, by Bucket.state."""


def choose(buckets: Sequence[Bucket], share: float) -> list[Bucket]:
    """Choose whole buckets with this share of all elements, spread evenly, beginning with the first one."""
    chosen, elements, total = [], 0, 0
    for bucket in buckets:
        numel = sum(shape.numel() for shape in bucket.shapes)
        total += numel
        if elements < share * total:
            chosen.append(bucket)
            elements += numel
    return chosen


def find_threads(rank: int, hosts: Sequence[str], cores: Sequence[set[int]]) -> int:
    """How many threads update: torch's number if OMP_NUM_THREADS has chosen it, else this rank's share of its
    cores. torchrun sets OMP_NUM_THREADS=1 if it starts several ranks.

    hosts, cores: by rank, its host_name(), and the cores that it may use there. Ranks of a host that do not
        step together with these are taken to be bound to cores likewise.
    """
    chosen, ranks = os.environ.get("OMP_NUM_THREADS"), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if chosen is not None and not (chosen == "1" and ranks > 1):
        return torch.get_num_threads()
    here = [own for host, own in zip(hosts, cores, strict=True) if host == hosts[rank]]
    sharing = sum(not cores[rank].isdisjoint(own) for own in here)
    return max(1, len(cores[rank]) * len(here) // (sharing * max(ranks, len(here))))


def check_room(buckets: Sequence[Bucket], sums: bool) -> None:
    """Raise RuntimeError if host memory will not hold masters and state of these buckets, and FP32 gradients
    with `sums`: else the kernel kills the process in the first step.
    """
    room, ranks = free_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = sum(b.slice_numel * (KEPT_BYTES[b.state] + 4 * sums) for b in buckets)
    records = [record for b in buckets for record in map(record_of, b.parameters) if record is not None]
    initial = [record.attachments.get(INIT_VAL) for record in records]  # which masters replace
    needed = int(ranks * (own - sum(value.nbytes for value in initial if value is not None)))
    if room is not None and needed > room:
        raise RuntimeError(
            f"masters and state need {needed / 1e9:.1f} GB more of host memory for {ranks} ranks of this "
            f'host, and {room / 1e9:.1f} GB are free: use state="compact" or a smaller offload, or raise a '
            f"limit ({_limits()})"
        )


def free_memory() -> int | None:
    """Bytes of host memory that this process can have yet; None if the system does not say."""
    known = _fields(MEMINFO)
    if not known.keys() >= {"MemAvailable", "SwapFree"}:
        return None
    free = 1024 * (known["MemAvailable"] + known["SwapFree"])
    for path, limit in _cgroup_limits():
        held = _fields(path.with_name("memory.stat"))
        cached = held.get("active_file", 0) + held.get("inactive_file", 0)
        free = min(free, limit - int(path.with_name(USAGES[path.name]).read_text()) + cached)
    return free


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file whose lines are a name, a number, and perhaps a unit."""
    lines = map(str.split, path.read_text().splitlines() if path.exists() else ())
    return {name.rstrip(":"): int(number) for name, number, *_ in lines}


def _cgroup_limits() -> list[tuple[Path, int]]:
    found = [(path, path.read_text().strip()) for path in CGROUP_LIMITS if path.exists()]
    return [(path, int(limit)) for path, limit in found if limit != "max"]


class Slots:
    """Memory in which one offloaded bucket at a time travels. [Note: when a slot may be written]"""

    up: torch.Tensor  # uint8, pinned: codes, then whole scales that travel; or values of parameters
    down: torch.Tensor  # uint8, pinned: gradients
    amaxes: torch.Tensor  # float32, pinned: a plan's reduced vector
    means: torch.Tensor  # float32, on the device: gradients before they come down

    def __init__(self, device: torch.device):
        self._device = device
        self._sent: torch.cuda.Event | None = None  # the end of the last copies to the device

    def fill(self, write: Callable[[], Copies]) -> None:
        """Once `up` and `amaxes` are free, have write() write one, and begin the copies that it returns."""
        wait(self._sent)
        self._sent = copy(write(), self._device)

    def send_up(self, masters: torch.Tensor, weights: torch.Tensor) -> None:
        """Round masters to the slice of weights, and begin to copy them there."""
        rounded = self.up[: weights.nbytes].view(weights.dtype)
        self.fill(lambda: [(weights, rounded.copy_(masters))])


def copy(copies: Copies, device: torch.device) -> torch.cuda.Event | None:
    """Begin to copy. Returns the end of the copies; None on a CPU."""
    for target, source in copies:
        target.copy_(source, non_blocking=True)
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(event: torch.cuda.Event | None) -> None:
    """Have the host wait."""
    if event is not None:
        event.synchronize()


class Offload:
    """The state that offloaded buckets share: slots, a stream, threads, and the decision of a step.

    buckets: of the optimizer. Those that choose() returns get `slots`. share: as of choose().
    sums: whether gradients are added up on the host.

    Raises RuntimeError if there is not enough memory, or not enough that can be pinned.
    """

    def __init__(self, buckets: Sequence[Bucket], share: float, threads: int, sums: bool):
        self.device, chosen = buckets[0].device, choose(buckets, share)
        self.sums = sums
        check_room(chosen, sums)
        self.is_used = bool(chosen)
        self.threads = threads if chosen else None
        self.pinned_bytes = 0
        on_gpu = self.device.type == "cuda" and self.is_used
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None  # brings gradients down
        self._slots = Slots(self.device), Slots(self.device)
        most = max(map(_up_bytes, chosen), default=0)
        for slots in self._slots:
            slots.up = self._pinned((most,), torch.uint8)
        for n, bucket in enumerate(chosen):
            bucket.slots = self._slots[n % 2]
        # The decision of a step, as the host's kernels read it; made by follow():
        self.skip = self.present = self._own_factor = None
        self._decision: Copies = []
        self._factor: Copies = []
        self.decided: torch.cuda.Event | None = None  # the end of the last bring_down_decision()
        self._on_its_way: tuple[Slots, Callable[[], None]] | None = None
        """The slots whose means are to go to `gradients` of a bucket, and what brings them there."""

    def allocate(self, exchanges: Sequence[BucketExchange]) -> None:
        """Make the other slots, and memory of sums, once plans and exchanges are built."""
        mine = [exchange for exchange in exchanges if exchange.bucket.is_offloaded]
        sizes = [e.bucket.slice_numel * e.arrives_as.itemsize for e in mine]
        numels = [e.bucket.slice_numel for e in mine if not e.is_in_place]
        words = [e.bucket.plan.reduced.numel() for e in mine if e.bucket.plan is not None]
        for slots in self._slots:
            slots.down = self._pinned((max(sizes, default=0),), torch.uint8)
            slots.amaxes = self._pinned((max(words, default=0),), torch.float32)
            slots.means = torch.zeros(max(numels, default=0), dtype=torch.float32, device=self.device)
        for exchange in mine if self.sums else ():
            _ = exchange.bucket.gradients  # makes it

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            made = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)
        except RuntimeError as error:
            needed = torch.Size(shape).numel() * dtype.itemsize
            raise RuntimeError(
                f"offload needs {needed} more bytes of pinned host memory beside {self.pinned_bytes} that it "
                f"has pinned: use a smaller bucket_mb, or raise a limit ({_limits()}). {error}"
            ) from error
        self.pinned_bytes += made.nbytes
        return made

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Give the kernels inside `threads`: they use torch's number of threads."""
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            if self.threads is not None:
                torch.set_num_threads(before)

    def follow(self, skip: torch.Tensor, present: torch.Tensor) -> None:
        """Bring these words of the device down with gradients, to `skip` and `present`."""
        if self.is_used:
            self.skip, self.present = (self._pinned(words.shape, words.dtype) for words in (skip, present))
            self._own_factor = self._pinned((), torch.float32)
            self._decision = [(self.skip, skip), (self.present, present)]

    def begin(self, factor: torch.Tensor | None) -> dict[str, torch.Tensor | None] | None:
        """Begin a step whose gradients are multiplied by this factor. Returns `skip` and `factor` for the
        host's kernels; None if there are no offloaded buckets.
        """
        if not self.is_used:
            return None
        self._factor = [] if factor is None else [(self._own_factor, factor)]
        return {"skip": self.skip, "factor": None if factor is None else self._own_factor}

    def settle(self, slots: Slots | None = None) -> None:
        """Finish what OffloadedExchange.average() has begun. slots: only if the means are in these."""
        if self._on_its_way is not None and slots in (None, self._on_its_way[0]):
            finish, self._on_its_way = self._on_its_way[1], None
            finish()

    def bring_down_decision(self) -> None:
        """Begin to bring down the decision on a bucket whose gradients came down before the vote."""
        self.decided = self.bring_down([])

    def bring_down(self, copies: Copies) -> torch.cuda.Event | None:
        """Begin to copy gradients and the decision of the step to the host. Returns the end of the copies."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for _, gradient in copies:
                gradient.record_stream(self._stream)  # it may be freed before it is copied
        with torch.cuda.stream(self._stream):
            return copy([*copies, *self._decision, *self._factor], self.device)


def _limits() -> str:
    """The limits of locked memory of this process, and of all memory of its cgroup, as text."""
    locked, found = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], []
    if locked != resource.RLIM_INFINITY:
        found.append(f"ulimit -l is {locked} bytes")
    found += [f"{path} is {limit}" for path, limit in _cgroup_limits()]
    return ", ".join(found) or "neither ulimit -l nor the cgroup has one"


def _up_bytes(bucket: Bucket) -> int:
    """Bytes of codes or values of this rank's slice, and of whole scales that travel."""
    if not bucket.is_packed:
        return bucket.slice_numel * bucket.parameters[0].dtype.itemsize
    scales = travelling_scales([weight.record for weight in bucket.parameters])
    return bucket.slice_numel // 2 + sum(scale.nbytes for scale in scales)


class OffloadedPlan:
    """The part of CastPlan that a step, FusedAdamW and ShardedParameters use, for an offloaded bucket.

    It is made of two plans. `on_device` has no masters: it agrees with the other ranks and writes scales.
    `on_host` has the masters, and a vector of amaxes in the same layout: it writes this rank's codes.

    masters: by parameter, on the host. amax_groups, found_inf: as of CastPlan. Building is collective.
    """

    def __init__(
        self,
        bucket: Bucket,
        masters: Sequence[torch.Tensor | None],
        amax_groups: Sequence[Sequence[torch.Tensor]],
        found_inf: torch.Tensor,
    ):
        self._slots, self._device, up = bucket.slots, bucket.device, bucket.slots.up
        self._is_shared = bucket.world_size > 1
        nothing = [None] * len(masters)
        options = None, amax_groups, "skip", found_inf
        request, error = attempt(check_request, bucket.parameters, nothing, nothing, *options)
        self._shards = [shard if shard.numel else Shard(0, 0) for shard in bucket.shards]
        if not error:
            request.shards = self._shards  # for the other ranks; no stage that reads masters is run
        self.on_device = CastPlan.of(request, error, bucket.group())
        self._header = self.on_device.reduced[:HEADER_WORDS].to("cpu", copy=True)
        """The header of a reduced vector, unless a rank has joined with a flag."""
        records, used = [], bucket.slice_numel // 2
        self._codes, self._own = up[:used], bucket.weights[bucket.begin // 2 :][:used]
        """This rank's slice of codes on the host and on the device."""
        self._scales: list[torch.Tensor] = []  # on the host, as bytes: of each weight whose scales travel
        for record in self.on_device.records:
            scale = None
            if record.scales_travel:
                scale = up[used : used + record.rowwise.scale_places["compact"].nbytes]
                used += scale.nbytes
                self._scales.append(scale)
            records.append(_on_host(record, scale))
        starts = [shard.start if shard.numel else None for shard in self._shards]
        ranges = bucket.own_views(range(bucket.slice_numel))  # of the slice's elements, two per byte
        codes = [None if own is None else self._codes[own.start // 2 : own.stop // 2] for own in ranges]
        own = check_request(records, list(masters), starts, codes, None, "skip", None)
        own.amax_groups = request.amax_groups
        self.on_host = CastPlan.of(own, OwnError(), None)
        self._find_places()
        # The update, on the host
        self.reduced, self.master_pieces = self.on_host.reduced, self.on_host.master_pieces
        self.begin_update, self.end_update = self.on_host.begin_update, self.on_host.end_update
        # The exchange between ranks, and the weights, on the device
        plan = self.on_device
        self.wire, self.check, self.stage_scales = plan.wire, plan.check, plan.stage_scales
        self.complete, self.derive_columns = plan.complete, plan.derive_columns
        self.note_written = plan.note_written

    def _find_places(self) -> None:
        """Find the places of this rank's codes and scales, on the device and on the host."""
        records, self._places = self.on_device.records, [(self._own, self._codes)]
        own = map(byte_range, travelling_shards(records, self._shards))
        for (begin, end), whole, host in zip(own, travelling_scales(records), self._scales, strict=True):
            self._places.append((whole.view(-1)[begin:end], host[begin:end]))

    def refresh(self) -> None:
        self.on_device.refresh()
        self.on_host.refresh()
        self._find_places()

    def start_step(self) -> RuntimeError | None:
        plan, error = self.on_device, OwnError()
        with error:
            self.on_host.start_step()  # computes the amaxes, unless the update has left them
            plan.begin_update()
            self._slots.fill(self._send_amaxes)
            plan.end_update()
        if error:
            plan.abstain()
            error.raise_if_any()
        return plan.start_step()

    def _send_amaxes(self) -> Copies:
        amaxes = self._slots.amaxes[: self.reduced.numel()].copy_(self.reduced)
        return [(self.on_device.reduced[HEADER_WORDS:], amaxes[HEADER_WORDS:])]

    def abstain(self) -> None:
        self.on_host.begin_update()  # takes back amaxes
        self.on_device.abstain()

    def finish_step(self, halfway: Any = None) -> None:
        self.on_device.finish_step(write_codes=self._write_codes)

    def _write_codes(self) -> None:
        if self._is_shared:  # else the amaxes on the host are those of all ranks
            amaxes = self._slots.amaxes[: self.reduced.numel()]
            wait(copy([(amaxes, self.on_device.reduced)], self._device))
            if not amaxes[:HEADER_WORDS].equal(self._header):
                return  # a rank has joined with a flag, so that no rank writes
            self.reduced[HEADER_WORDS:].copy_(amaxes[HEADER_WORDS:])
        self._slots.fill(self._cast)

    def _cast(self) -> Copies:
        if self.reduced.isinf().any():  # amax groups with a NaN or Inf keep their codes
            wait(copy([(host, device) for device, host in self._places], self._device))
        self.on_host.finish_step()
        return self._places


def _on_host(record: NVFP4Storage, scale: torch.Tensor | None) -> NVFP4Storage:
    """A record on the host, without codes. scale: memory of its scales, if they travel."""
    made = NVFP4Storage.from_context(record.shape, record.context())
    made.name, scales = record.name, {}
    if scale is not None:
        scales["compact"] = scale.view(SCALE_DTYPE).view(record.scale_shape("rowwise", "compact"))
    made.rowwise = Side(None, scales, torch.zeros(record.amax_shape, dtype=torch.float32, device="cpu"))
    return made


class OffloadedExchange(BucketExchange):
    """An exchange whose update is on the host: bring_down() begins to copy the means there, or in a world of
    one the gradients that are their own means, and receive() waits for them.

    inner: the exchange of the bucket on the device.
    """

    def __init__(self, inner: BucketExchange, offload: Offload):
        self.bucket, self.memory, self.received = inner.bucket, inner.memory, inner.received
        self.send, self.finish, self.gather = inner.send, inner.finish, inner.gather
        self.gradient_bytes, self.means_travel_as = inner.gradient_bytes, inner.means_travel_as
        self.bytes_between_hosts = inner.bytes_between_hosts
        self._inner, self._offload = inner, offload
        self.is_in_place = isinstance(inner, LocalExchange) and inner.arrives_as is not None
        self.arrives_as = inner.arrives_as if self.is_in_place else torch.float32
        self._event: torch.cuda.Event | None = None
        self._failure = OwnError()
        self._views: Gradients = ()

    @property
    def error(self) -> OwnError:
        return self._inner.error

    def bring_down(self, reduces: bool, squares: torch.Tensor | None = None) -> None:
        """reduces: whether the means are not yet in `bucket.gradients`. receive() raises an error."""
        bucket, self._failure = self.bucket, OwnError()
        with self._failure:
            copies: Copies = []
            if reduces:
                self.present = self._inner.present
            self._views = self._begin_mean(copies, squares) if reduces else bucket.gradient_views
            self._event = self._offload.bring_down(copies)

    def _begin_mean(self, copies: Copies, squares: torch.Tensor | None) -> Gradients:
        """Make the mean. Adds to `copies` what brings it to the slot, of which views are returned."""
        bucket, numel = self.bucket, self.bucket.slice_numel
        slot = bucket.slots.down[: numel * self.arrives_as.itemsize].view(self.arrives_as)
        views = bucket.own_views(slot)
        if not self.is_in_place:
            means = bucket.slots.means[:numel]
            self._inner.average(means, squares)
            copies.append((slot, means))
            return views
        for view, gradient in zip(views, self._inner.receive().own, strict=True):
            if view is not None and gradient is not None:
                copies.append((view, gradient.view(-1)))
            elif view is not None:
                view.zero_()
        if squares is not None:
            ops.add_squares([own for _, own in copies], squares)
        return views

    def receive(self) -> Arrived:
        wait(self._event)
        wait(self._offload.decided)
        self._failure.raise_if_any()
        return Arrived(self._views, None)

    def average(self, means: torch.Tensor, squares: torch.Tensor | None = None, adds: bool = False) -> None:
        """means: on the host, where Offload.settle() finishes them. adds: whether the mean is added there."""
        offload = self._offload
        offload.settle(self.bucket.slots)
        self.bring_down(True, squares)
        offload.settle()  # of another slot, while this bucket comes down
        self._failure.raise_if_any()
        offload._on_its_way = self.bucket.slots, functools.partial(self._take_mean, means, adds)

    def _take_mean(self, means: torch.Tensor, adds: bool) -> None:
        for arrived, own in zip(self.receive().own, self.bucket.own_views(means), strict=True):
            if own is not None and not adds:
                own.copy_(arrived)
            elif own is not None:  # in chunks, since torch makes an FP32 copy of what it adds
                for part, target in zip(arrived.split(CHUNK), own.split(CHUNK), strict=True):
                    target.add_(part)
