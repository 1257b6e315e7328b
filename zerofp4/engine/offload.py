"""Buckets whose masters and optimizer state are in host memory, updated there by the CPU to the same bytes.

To other ranks an offloaded bucket is like any other: its gradients are averaged on the device, its amaxes are
reduced there, its scales are made there, and its weights are gathered and transposed there. But the masters,
their state and the cast of the masters are on the host, whose kernels make the bytes of the device's:

    on the device                                                   on the host
    the mean of the gradients          -- gradients, skip, ... -->  update, which leaves amaxes
    one all-reduce of amaxes           <------ own amaxes --------
    scales                             ------ all amaxes -------->  cast
    gather of weights, transposes      <- codes (or values), scales that travel

Nothing copies masters and state, so they are in ordinary memory. What travels is in pinned slots (`Offload`).

The thread that calls step() computes, in kernels that use torch's threads. In turn t of a step it begins to
bring down the gradients of bucket t, on a stream of their own, updates bucket t - 1 and casts bucket t - 2,
whose codes go up meanwhile. Buckets on the device are only queued, so the GPU updates them at the same time:
offloaded ones come first and are spread evenly among them (`choose()`).

[Note: when a slot may be written] There are two slots of each kind, and offloaded buckets use them in turn:
bucket n + 2 uses those of bucket n.

    slot        written by                        read by                       free
    means       the exchange, turn n              copy down, own stream         turn n + 1, when the host has
    gradients   that copy                         update, turn n + 1            waited for the copy
    amaxes      update, turn n + 1; then a copy   copy up, current stream;      turn n + 2, when the host has
                of the reduced ones, turn n + 2   then cast, turn n + 2         waited for the second copy
    codes       cast, turn n + 2                  copy up, current stream       turn n + 4, when the host
                                                                                waits for that copy

The host reads the decision of a step with the gradients: `skip`, the factor of clip_grad_norm_ and presence
flags come down, too, and kernels of the host read the copies as those of a GPU read the device's words.

If the parameters are on a CPU, the same steps run without streams.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerofp4.cast import CastPlan, check_request, travelling_scales, travelling_shards
from zerofp4.distributed import OwnError, attempt
from zerofp4.engine.buckets import Bucket
from zerofp4.engine.exchange import Abstain, Arrived, BucketExchange, Gradients, LocalExchange, Waitable
from zerofp4.format import SCALE_DTYPE
from zerofp4.layout import round_up
from zerofp4.ops import HEADER_WORDS
from zerofp4.shard import Shard, byte_range
from zerofp4.storage import NVFP4Storage, Side

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and their sources."""


def choose(buckets: Sequence[Bucket], share: float) -> list[Bucket]:
    """Choose whole buckets until they have this share of all elements, spread evenly, beginning with the
    first bucket.
    """
    chosen, elements, total = [], 0, 0
    for bucket in buckets:
        numel = sum(shape.numel() for shape in bucket.shapes)
        total += numel
        if elements < share * total:
            chosen.append(bucket)
            elements += numel
    return chosen


class Offload:
    """The memory in which the offloaded buckets of one optimizer travel.

    buckets: of the optimizer, in the order of a step. Those that choose() returns get a `lane`.
    share: as of choose().

    Raises RuntimeError if there is not enough memory that can be pinned.
    """

    def __init__(self, buckets: Sequence[Bucket], share: float):
        self.device = buckets[0].device
        self.on_gpu = self.device.type == "cuda"
        chosen = choose(buckets, share)
        self.is_used = bool(chosen)
        self.pinned_bytes = 0
        for n, bucket in enumerate(chosen):
            bucket.lane = Lane(self, bucket, n % 2)
        self.up = self._slots(max(map(_up_bytes, chosen), default=0))
        # Made by allocate(), when it is known how large they are:
        self.down: list[torch.Tensor] = []
        self.amaxes: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(self.device) if self.on_gpu and self.is_used else None
        """Brings gradients down."""
        self.skip = self.factor = self.present = None
        """On the host, what kernels read besides gradients. Made by follow()."""
        self.sent_up: list[torch.cuda.Event | None] = [None, None]
        """By slot of `up`, the end of the last copies from there."""
        self._mirrors: Copies = []
        self._factor: Copies = []

    def allocate(self, exchanges: Sequence[BucketExchange]) -> None:
        """Make the other slots, once plans and exchanges are built."""
        mine = [exchange for exchange in exchanges if exchange.bucket.lane is not None]
        # If each gradient is its own mean, clip_grad_norm_ makes no FP32 means for a step to bring down.
        are_means = all(exchange.memory is None for exchange in exchanges)
        sizes = [e.bucket.slice_numel * (e.arrives_as.itemsize if are_means else 4) for e in mine]
        self.down = self._slots(max(sizes, default=0))
        plans = [e.bucket.plan for e in mine if e.bucket.plan is not None]
        self.amaxes = self._slots(max((plan.reduced.nbytes for plan in plans), default=0))
        most = max((e.bucket.slice_numel for e in mine if not e.is_in_place), default=0)
        self.means = [torch.zeros(most, dtype=torch.float32, device=self.device) for _ in range(2)]

    def _slots(self, nbytes: int) -> list[torch.Tensor]:
        nbytes = round_up(nbytes, 256)  # views of them have other dtypes
        return [self._pinned((nbytes,), torch.uint8) for _ in range(2)]

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            made = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=self.on_gpu and self.is_used)
        except RuntimeError as error:
            needed = torch.Size(shape).numel() * dtype.itemsize
            raise RuntimeError(
                f"offload needs {needed} more bytes of pinned host memory ({self.pinned_bytes} are pinned): "
                f"use a smaller bucket_mb, or raise the limits of this process. {error}"
            ) from error
        self.pinned_bytes += made.nbytes
        return made

    # The decision of a step

    def follow(self, skip: torch.Tensor, present: torch.Tensor) -> None:
        """Bring these words of the device down with gradients: to `skip` and `present`."""
        if not self.is_used:
            return
        self.skip, self.present = (self._pinned(words.shape, words.dtype) for words in (skip, present))
        self.factor = self._pinned((), torch.float32)
        self._mirrors = [(self.skip, skip), (self.present, present)]

    def begin(self, factor: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Begin a step whose gradients are multiplied by this factor. Returns `skip` and the factor as the
        host's kernels read them.
        """
        self._factor = [] if factor is None or not self.is_used else [(self.factor, factor)]
        return self.skip, None if factor is None else self.factor

    # Copies

    def bring_down(self, copies: Copies) -> torch.cuda.Event | None:
        """Copy to the host, after the work on the current stream. Returns the end of the copies, for which
        the host has to wait.
        """
        copies = [*copies, *self._mirrors, *self._factor]
        if self._stream is None:
            return self.copy(copies)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            return self.copy(copies)

    def copy(self, copies: Copies) -> torch.cuda.Event | None:
        """Copy on the current stream. Returns the end of the copies; None on a CPU."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        return torch.cuda.current_stream(self.device).record_event() if self.on_gpu else None


def wait(event: torch.cuda.Event | None) -> None:
    """Have the host wait."""
    if event is not None:
        event.synchronize()


def _up_bytes(bucket: Bucket) -> int:
    """Bytes of codes or values of this rank's slice, and of whole scales that travel."""
    if not bucket.is_packed:
        return bucket.slice_numel * bucket.parameters[0].dtype.itemsize
    scales = travelling_scales([weight.record for weight in bucket.parameters])
    return bucket.slice_numel // 2 + sum(scale.nbytes for scale in scales)


class Lane:
    """The slots of an offloaded bucket. [Note: when a slot may be written]"""

    def __init__(self, offload: Offload, bucket: Bucket, slot: int):
        self.offload, self._numel, self._slot = offload, bucket.slice_numel, slot

    @property
    def up(self) -> torch.Tensor:
        return self.offload.up[self._slot]

    @property
    def means(self) -> torch.Tensor:
        return self.offload.means[self._slot][: self._numel]

    def gradients(self, dtype: torch.dtype) -> torch.Tensor:
        return self.offload.down[self._slot].view(dtype)[: self._numel]

    def amaxes(self, numel: int) -> torch.Tensor:
        return self.offload.amaxes[self._slot].view(torch.float32)[:numel]

    def fill_up(self, write: Callable[[], Copies]) -> None:
        """Have write() write `up`, once it is free, and begin the copies to the device that it returns."""
        sent = self.offload.sent_up
        wait(sent[self._slot])
        sent[self._slot] = self.offload.copy(write())

    def send_up(self, masters: torch.Tensor, weights: torch.Tensor) -> None:
        """Round masters to the slice of weights, and begin to copy them there."""
        rounded = self.up.view(weights.dtype)[: self._numel]
        self.fill_up(lambda: [(weights, rounded.copy_(masters))])


class OffloadedPlan:
    """The CastPlan of an offloaded bucket, in two halves. `front`, on the device, agrees with the other ranks
    and writes scales; `twin`, on the host, has the masters and a vector of amaxes in the same layout, and
    casts. It has what a step, FusedAdamW and ShardedParameters use of a plan.

    masters: by parameter, on the host. amax_groups, found_inf: as of CastPlan.

    Building is collective.
    """

    def __init__(
        self,
        bucket: Bucket,
        masters: Sequence[torch.Tensor | None],
        amax_groups: Sequence[Sequence[torch.Tensor]],
        found_inf: torch.Tensor,
    ):
        self._lane, up = bucket.lane, bucket.lane.up
        nothing = [None] * len(masters)
        options = None, amax_groups, "skip", found_inf
        request, error = attempt(check_request, bucket.parameters, nothing, nothing, *options)
        self._shards = [shard if shard.numel else Shard(0, 0) for shard in bucket.shards]
        if not error:
            request.shards = self._shards  # whose masters are the twin's
        self.front = CastPlan.of(request, error, bucket.group())
        self._header = self.front.reduced[:HEADER_WORDS].to("cpu", copy=True)
        """What a reduced vector begins with, unless a rank has joined with a flag."""
        twins, used = [], bucket.slice_numel // 2
        self._codes = up[:used]
        self._own = bucket.weights[bucket.begin // 2 :][:used]
        """On the device, this rank's slice of codes."""
        self._scales: list[torch.Tensor] = []
        """On the host, as bytes: of each weight whose scales travel."""
        for record in self.front.records:
            scale = None
            if record.scales_travel:
                scale = up[used : used + record.rowwise.scale_places["compact"].nbytes]
                used += scale.nbytes
                self._scales.append(scale)
            twins.append(_twin(record, scale))
        starts = [shard.start if shard.numel else None for shard in self._shards]
        ranges = bucket.own_views(range(bucket.slice_numel))  # of the slice's elements, two per byte
        codes = [None if own is None else self._codes[own.start // 2 : own.stop // 2] for own in ranges]
        own = check_request(twins, list(masters), starts, codes, None, "skip", None)
        own.amax_groups = request.amax_groups
        self.twin = CastPlan.of(own, OwnError(), None)
        self._find_places()
        # The update, on the host
        self.reduced, self.master_pieces = self.twin.reduced, self.twin.master_pieces
        self.begin_update, self.end_update = self.twin.begin_update, self.twin.end_update
        # What travels between ranks, and the weights, on the device
        self.wire, self.check, self.stage_scales = self.front.wire, self.front.check, self.front.stage_scales
        self.complete, self.derive_columns = self.front.complete, self.front.derive_columns
        self.note_written = self.front.note_written

    def _find_places(self) -> None:
        """Find the places of this rank's codes and scales, on the device and on the host."""
        records, self._places = self.front.records, [(self._own, self._codes)]
        own = map(byte_range, travelling_shards(records, self._shards))
        for (begin, end), whole, host in zip(own, travelling_scales(records), self._scales, strict=True):
            self._places.append((whole.view(-1)[begin:end], host[begin:end]))

    def refresh(self) -> None:
        self.front.refresh()
        self.twin.refresh()
        self._find_places()

    def start_step(self) -> RuntimeError | None:
        error, amaxes = OwnError(), self._lane.amaxes(self.reduced.numel())
        with error:
            self.twin.start_step()  # computes the amaxes, unless the update has left them
            amaxes.copy_(self.reduced)
            self.front.begin_update()
            self.front.reduced[HEADER_WORDS:].copy_(amaxes[HEADER_WORDS:], non_blocking=True)
            self.front.end_update()
        if error:
            self.front.abstain()
            error.raise_if_any()
        return self.front.start_step()

    def abstain(self) -> None:
        self.twin.begin_update()  # takes back amaxes
        self.front.abstain()

    def finish_step(self, halfway: Any = None) -> None:
        self.front.finish_step(write_codes=self._write_codes)

    def _write_codes(self) -> None:
        amaxes, offload = self._lane.amaxes(self.reduced.numel()), self._lane.offload
        wait(offload.copy([(amaxes, self.front.reduced)]))
        if not amaxes[:HEADER_WORDS].equal(self._header):
            return  # a rank has joined with a flag, so that no rank writes
        self.reduced[HEADER_WORDS:].copy_(amaxes[HEADER_WORDS:])
        self._lane.fill_up(self._cast)

    def _cast(self) -> Copies:
        if self.reduced.isinf().any():  # amax groups with a NaN or Inf keep what they have
            wait(self._lane.offload.copy([(host, device) for device, host in self._places]))
        self.twin.finish_step()
        return self._places


def _twin(record: NVFP4Storage, scale: torch.Tensor | None) -> NVFP4Storage:
    """A record on the host, without codes. scale: memory of its scales, if they travel."""
    twin = NVFP4Storage.from_context(record.shape, record.context())
    twin.name, scales = record.name, {}
    if scale is not None:
        scales["compact"] = scale.view(SCALE_DTYPE).view(record.scale_shape("rowwise", "compact"))
    twin.rowwise = Side(None, scales, torch.zeros(record.amax_shape, dtype=torch.float32, device="cpu"))
    return twin


class OffloadedExchange(BucketExchange):
    """An exchange whose update is on the host: bring_down() begins to copy the means there, or in a world of
    one the gradients that are their own means, and receive() waits for them.

    inner: the exchange of the bucket on the device.
    """

    halfway = None

    def __init__(self, inner: BucketExchange):
        self.inner, self.bucket, self.memory = inner, inner.bucket, inner.memory
        self.received, self._lane = inner.received, inner.bucket.lane
        self.is_in_place = isinstance(inner, LocalExchange) and inner.arrives_as is not None
        self.arrives_as = inner.arrives_as if self.is_in_place else torch.float32
        self._event: torch.cuda.Event | None = None
        self._failure = OwnError()
        self._views: Gradients = ()

    @property
    def present(self) -> Sequence[bool] | None:
        return self.inner.present

    @property
    def error(self) -> OwnError:
        return self.inner.error

    def send(self, gradients: Gradients | Abstain) -> None:
        self.inner.send(gradients)

    def bring_down(self, reduces: bool) -> None:
        """reduces: whether the means are not yet in `bucket.gradients`. An error is raised by receive()."""
        lane, self._failure, copies = self._lane, OwnError(), []
        with self._failure:
            if reduces and self.is_in_place:
                slot = lane.gradients(self.arrives_as)
                self._views = self.bucket.own_views(slot)
                pairs = zip(self._views, self.inner.receive().own, strict=True)
                copies = [(v, g.view(-1)) for v, g in pairs if v is not None and g is not None]
            else:
                if reduces:
                    self.inner.average(into=lane.means)
                slot = lane.gradients(torch.float32)
                self._views = self.bucket.own_views(slot)
                copies = [(slot, lane.means if reduces else self.bucket.gradients)]
            self._event = lane.offload.bring_down(copies)

    def receive(self) -> Arrived:
        wait(self._event)
        self._failure.raise_if_any()
        return Arrived(self._views, None)

    def average(self, squares: torch.Tensor | None = None, into: torch.Tensor | None = None) -> None:
        self.inner.average(squares, into)

    def finish(self) -> None:
        self.inner.finish()

    def gather(self) -> Waitable | None:
        return self.inner.gather()
