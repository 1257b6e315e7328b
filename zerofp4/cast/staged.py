"""StagedPlan: the stages of a cast, for what runs other work between them."""

import ctypes
import enum
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from zerofp4 import distributed
from zerofp4.cast.reduced_vector import ReducedVector
from zerofp4.cast.request import CastRequest, check_refresh, matrix_name
from zerofp4.cast.scales import gathered_buffers, gathered_shards, travelling_scales, travelling_shards
from zerofp4.cast.signature import Signature, check_agreement, plan_hash, signature_of
from zerofp4.distributed import GroupReference, OwnError, PackedGather, Pending, attempt
from zerofp4.ops import (
    GATHER_REFUSED,
    GATHER_WITHOUT_STEP,
    PEER_ERROR,
    PLAN_MISMATCH,
    STATUS_RANK_SHIFT,
    Addresses,
    CastStages,
    GatherHeader,
    MasterPiece,
    PostStage,
    current_stream,
    increment_versions,
    is_capturing,
    target_of,
)
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage

REDUCTION = "reducing the amaxes of a cast"
"""The stage of a step's one collective."""

PEER_MESSAGE = "another rank could not take part in the cast; no rank changed a weight"

_built: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many plans this rank has begun to build in a group."""


class Amaxes(enum.Enum):
    """Whether the reduced vector holds the amaxes of the next step: begin_update() to end_update(). CAPTURED
    are those that replays of a CUDA graph will leave: for a step in the graph, not for one outside.
    """

    NONE, BEGUN, LEFT, CAPTURED = range(4)


class StagedPlan:
    """What is behind a CastPlan, with a method for each stage of a step.

    request, error: what attempt(check_request, ...) returned; an error on any rank is raised on all of them.
    group: process group, or None in a world of one.

    reduced: float32 vector that a step reduces by maximum over the ranks: the words of a ReducedVector.
    wire: what travels of it, the same values in bfloat16 where all weights are bfloat16, else `reduced`
    itself.
    """

    def __init__(self, request: CastRequest | None, error: OwnError, group: dist.ProcessGroup | None):
        if not error:
            # What this rank cannot run must be known to all before any waits for the others.
            _, error = attempt(target_of, request.device)
        number = 0
        if group is not None:
            _built[group] = number = _built.get(group, 0) + 1
        signature = request and tuple(signature_of(request, number))
        gathered = distributed.exchange(signature, error, group, "building a CastPlan")
        signatures = [Signature(*signature) for signature in gathered]
        check_agreement(signatures)

        self.group = GroupReference(group)
        self._request, self._device = request, request.device
        self._sharded = len(signatures) > 1
        self._names = [name for name, *_ in signatures[0].weights]
        self._rank_shards = [[Shard(*shard) for shard in signature.shards] for signature in signatures]
        for i, name in enumerate(self._names):
            distributed.check_disjoint(name, [of_rank[i] for of_rank in self._rank_shards])
        self._into_weights = all(signature.into_weights for signature in signatures)
        """Whether every rank's codes go to the weights, and not to fsdp_shard_model_weights."""
        self._vector = ReducedVector(
            request.records, request.amax_groups, self._rank_shards, request.device
        )
        self.reduced = self.wire = self._vector.words
        if self._sharded and {record.dtype for record in request.records} == {torch.bfloat16}:
            # Masters are rounded to the weights' dtype before anything else, so that an amax is a bfloat16
            # value, or +inf, and the header has bytes: nothing is rounded on the way.
            self.wire = torch.zeros_like(self.reduced, dtype=torch.bfloat16)
        self._amaxes = Amaxes.NONE
        self._travelling: Pending | None = None
        """The reduction that start_step() began."""
        self._own_found_inf = torch.zeros(1, dtype=torch.float32, device=request.device)
        self._status = StepStatus(request.device)
        self._captured: dict[int, torch.Tensor] = {}
        """By address, the storage that CUDA graphs use, which is kept alive here."""
        self._hash = plan_hash(signatures)
        self._stages = CastStages(
            self._vector.items(request),
            self.reduced,
            hash=self._hash,
            found_inf=self.found_inf,
            status=self._status.word,
        )
        self._stages.begin()  # a gather before the first step finds nothing wrong with it
        self._post = PostStage(request.records)
        self._gather: PackedGather | None = None
        """Made by the first all_gather()."""
        self._scale_gather: PackedGather | None = None
        """Made by stage_scales()."""
        self.addresses = self._present_addresses()

    @property
    def records(self) -> list[NVFP4Storage]:
        return self._request.records

    @property
    def found_inf(self) -> torch.Tensor:
        given = self._request.found_inf
        return self._own_found_inf if given is None else given

    def summary(self) -> str:
        """What the plan casts, for repr."""
        records, request = self.records, self._request
        elements = sum(record.shape.numel() for record in records)
        own = sum(shard.numel for shard in request.shards)
        return (
            f"weights={len(records)}, elements={elements}, on_this_rank={own}, "
            f"ranks={len(self._rank_shards)}, amax_groups={len(set(request.amax_groups))}, "
            f"device={str(self._device)!r}, on_nonfinite={request.on_nonfinite!r}"
        )

    # Amaxes that an optimizer leaves

    def master_pieces(self) -> list[MasterPiece]:
        """What this rank owns, one piece per matrix, for an optimizer that leaves amaxes in `reduced`. The
        pieces of the experts of a weight follow one another, and lie one behind the other in its master.

        Raises ValueError for a weight with blocks that boundaries of shards cut: no optimizer leaves their
        amaxes.
        """
        for name, cut in zip(self._names, self._vector.cut, strict=True):
            if cut:
                raise ValueError(
                    f"{name} has {len(cut)} blocks of 1x16 that shards cut: an optimizer leaves amaxes where "
                    "shards begin and end between blocks"
                )
        items = self._vector.items(self._request)
        return [item.piece for item in items if item.piece.shard.numel]

    def begin_update(self) -> None:
        """Clear `reduced` and write its header: the amaxes of every piece of master_pieces() may go in now.

        Amaxes that were left before are taken back. Queued on the current stream.
        """
        self._settle()
        self._stages.begin()
        self._amaxes = Amaxes.BEGUN

    def end_update(self) -> None:
        """The amaxes of all pieces are in `reduced`: the next step(), and no other, does not compute them. A
        step in which this rank cannot take part, begin_update() and refresh() take them back.

        Masters must not be written between here and step(), whose codes would not belong to its scales. Of an
        update and a step only one of which is captured in a CUDA graph the step computes amaxes itself.
        Raises RuntimeError without a begin_update() since the last step.
        """
        if self._amaxes is Amaxes.NONE:
            raise RuntimeError("end_update() without begin_update() since the last step or refresh()")
        self._amaxes = self._left()

    def leave_amaxes(self) -> None:
        """Compute the amaxes of all masters now, unless an update has left them: the next step() does not,
        and masters must not be written until then. Queued on the current stream. Nothing happens where
        storage has moved, as the step will say.
        """
        left = self._left()
        if self._amaxes is not left and self.find_moved(every=False) is None:
            self._settle()
            self._stages.begin_amax(self._stages.target())
            self._amaxes = left

    def _left(self) -> Amaxes:
        return Amaxes.CAPTURED if is_capturing(self._device) else Amaxes.LEFT

    # A step

    def run(self, error: OwnError, borrowed: Iterable[torch.Tensor | None] = ()) -> OwnError:
        """A step of a rank whose error, if it has found one, is raised once it has joined the others.

        borrowed: what the step uses and the plan does not hold. Returns what is now known to have gone
        wrong in an earlier step.
        """
        late = self._take_part(error, borrowed)
        self._reduce()
        self._write()
        return late

    def start_step(self) -> RuntimeError | None:
        """The first half of step(): its reduction is on its way, and other work may be queued beside it.
        finish_step() is the other half. Every rank must begin its collectives in the same order.

        Raises as step() does, and then there is nothing to finish; returns what is now known to have gone
        wrong in an earlier step.
        """
        late = self._take_part(OwnError(self.find_moved(every=False)), ())
        if self._sharded:
            self._pack()
            self._travelling = distributed.start_reduce_max(self.wire, self.group(), REDUCTION)
        return late.take()

    def finish_step(self, halfway: tuple[int, int, Callable[[], object]] | None = None) -> None:
        """What is queued after it on the current stream finds the scales and this rank's codes.

        halfway: the position of a weight, one of its rows (a stack [E, N, K] has E * N) or their number, and
        what to call where the codes of the weights before it are queued, and of its rows before that one.
        """
        self._settle()
        self._write(halfway)

    def _settle(self) -> None:
        """Wait for a reduction that was begun: where a step was left between its halves, too, nothing may be
        written where one may still arrive.
        """
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            distributed.in_phase("amaxes", travelling.wait)()
            self._unpack()

    def _take_part(self, error: OwnError, borrowed: Iterable[torch.Tensor | None]) -> OwnError:
        """Have this rank's amaxes in the vector, or raise the error once the others have heard of it."""
        self._settle()
        late = OwnError(self._status.take())
        if late:
            message = f"an earlier call had no effect: {late.take()}. This step took place"
            late = OwnError(RuntimeError(message))
        capturing = is_capturing(self._device)
        if capturing and not error:
            error = OwnError(self.find_moved())
        if error:
            self.abstain()
            error.raise_if_any(late.take())
        if self._request.on_nonfinite == "raise" and capturing:
            raise RuntimeError("on_nonfinite='raise' waits for the step, which a CUDA graph cannot capture")
        if capturing:
            self._hold(borrowed)
        if self._amaxes is not (Amaxes.CAPTURED if capturing else Amaxes.LEFT):
            self._stages.begin_amax(self._stages.target())
        self._amaxes = Amaxes.NONE
        return late

    def _write(self, halfway: tuple[int, int, Callable[[], object]] | None = None) -> None:
        """Scales and codes, from the reduced vector."""
        if halfway is None:
            self._stages.scale_cast(self._stages.target())
        else:
            position, row, between = halfway
            matrix = sum(record.experts or 1 for record in self.records[:position])
            if row and self.records[position].experts is not None:
                more, row = divmod(row, self.records[position].matrix[0])
                matrix += more
            self._stages.scale_cast_in_two(self._stages.target(), matrix, row, between)
        if self._scale_gather is not None:
            self._scale_gather.pack()
        if not is_capturing(self._device):
            self._status.queued()
        if self._request.on_nonfinite == "raise":
            self._status.wait()
            self._raise_nonfinite()

    @property
    def held_for_graphs(self) -> bool:
        """Whether a CUDA graph that was captured uses the plan."""
        return bool(self._captured)

    def _hold(self, borrowed: Iterable[torch.Tensor | None]) -> None:
        """Keep alive what the graph that is being captured will use."""
        self._stages.hold()
        buffers = [buffer for record in self.records for _, buffer in record.buffers()]
        used = [*buffers, *self._request.shard_tensors().values(), self.found_inf, *borrowed]
        self._captured.update((tensor.data_ptr(), tensor.detach()) for tensor in used if tensor is not None)

    def _reduce(self) -> None:
        if self._sharded:
            self._pack()
            distributed.reduce_max(self.wire, self.group(), REDUCTION)
            self._unpack()

    def _pack(self) -> None:
        if self.wire is not self.reduced:
            self.wire.copy_(self.reduced)

    def _unpack(self) -> None:
        if self.wire is not self.reduced:
            self.reduced.copy_(self.wire)

    def abstain(self) -> None:
        """In place of step(), of a rank that cannot take part and raises the reason itself: joins the
        reduction, flagged, so that no rank writes. Collective.
        """
        self._settle()
        self._amaxes = Amaxes.NONE
        self._stages.begin(error=True)
        self._reduce()

    def _raise_nonfinite(self) -> None:
        if not self._vector.has_nonfinite():
            return
        records = self._request.records
        bad = [matrix_name(i, records[i], e) for i, e in self._vector.nonfinite_matrices()]
        # The others were written, and post() may never come.
        increment_versions(self._request.versioned)
        raise FloatingPointError(
            f"master weights with NaN or Inf (after rounding to the weight's dtype): {', '.join(bad)}; "
            "these weights and their amax groups were not changed"
        )

    def decline(self) -> bool:
        """Join the reduction of a step of the other ranks, so that no rank writes, because this rank has
        other shards or options. Whether all ranks declined. Raises RuntimeError where a rank has an
        error.
        """
        self._stages.begin(error=True)
        self._vector.decline()
        self._reduce()
        declined = self._vector.declined()
        if declined is None:
            raise RuntimeError(PEER_MESSAGE)
        return declined

    # After a step

    def check(self) -> None:
        """See CastPlan.check."""
        self._status.wait()
        OwnError(self.find_moved()).raise_if_any()

    def all_gather(self) -> None:
        """See CastPlan.all_gather."""
        every = self._gather is None  # it takes addresses of its own
        if self._gather is None:
            self._gather = self._build_gather()
        capturing = self._sharded and is_capturing(self._device)
        self._gather.queue(OwnError(self.find_moved(every=every or capturing)))
        if self._sharded and not capturing:
            self._status.queued()

    def _build_gather(self) -> PackedGather:
        """Raises ValueError, the same on every rank, where not all codes are gathered from the ranks."""
        if not self._into_weights:
            raise ValueError("the codes of some ranks are in fsdp_shard_model_weights: gather those")
        numels = [record.shape.numel() for record in self.records]
        distributed.check_ownership(self._names, numels, self._rank_shards)
        header = GatherHeader(self.reduced, self._hash, self._status.word)
        shards = [gathered_shards(self.records, of_rank) for of_rank in self._rank_shards]
        return PackedGather(
            gathered_buffers(self.records), shards, self.group(), self._request.device, header
        )

    def stage_scales(self, zeros: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """For a caller that gathers the codes itself: uint8 [ranks, bytes], where from now on a step leaves
        this rank's scales that travel, and derive_columns() finds those of all. None where none do.

        zeros: makes it, from a shape and dtype.
        """
        travel = any(record.scales_travel for record in self.records)
        if not travel or not self._sharded:
            return None
        shards = [travelling_shards(self.records, of_rank) for of_rank in self._rank_shards]
        scales = travelling_scales(self.records)
        self._scale_gather = PackedGather(scales, shards, self.group(), self._device, zeros=zeros)
        return self._scale_gather.staging

    def complete(self) -> None:
        """CastPlan.post() of a caller that has looked at all addresses before the step, and saw nobody since
        who could have moved anything.
        """
        self.derive_columns()
        self.note_written()

    def derive_columns(self) -> None:
        """The first half of complete(): what is queued, for which others need not wait here."""
        if self._scale_gather is not None:
            self._scale_gather.unpack()
        self._post.run()

    def note_written(self) -> None:
        """The other half: a backward pass through the old values fails from now on."""
        increment_versions(self._request.versioned)

    # Addresses

    def refresh(self, master_weights: Sequence[torch.Tensor | None] | None = None) -> None:
        """See CastPlan.refresh."""
        before = self._request.masters
        if master_weights is not None:
            owned = zip(master_weights, self._request.shards, strict=True)
            self._request.masters = [master if shard.numel else None for master, shard in owned]
        try:
            check_refresh(self._request, self._names)
        except Exception:
            self._request.masters = before
            raise
        self._amaxes = Amaxes.NONE
        self._take_addresses()

    def _take_addresses(self) -> None:
        self._stages.bind(self._vector.items(self._request), self.found_inf)
        self._post.bind(self.records)
        if self._gather is not None:
            self._gather.bind(gathered_buffers(self.records))
        if self._scale_gather is not None:
            self._scale_gather.bind(travelling_scales(self.records))
        self.addresses = self._present_addresses()

    def _present_addresses(self, *, hold: bool = True) -> Addresses:
        request = self._request
        weights = dict(zip(self._names, request.weights, strict=True))
        return Addresses(weights, request.shard_tensors(), hold=hold)

    def find_moved(self, *, every: bool = True) -> RuntimeError | None:
        """An error for the first weight, master or buffer that has moved since the plan took its address;
        without `every` as far as a step looks.
        """
        return self.addresses.find_moved() if every else self.addresses.glance()

    # For a function that finds its plan: the same weights and shards at every call, tensors of each
    # call's own

    def fits(self, request: CastRequest) -> bool:
        """Whether a request for this plan's weights differs in nothing but where tensors are."""
        mine = self._request
        return (
            request.shards == mine.shards
            and request.amax_groups == mine.amax_groups
            and request.on_nonfinite == mine.on_nonfinite
        )

    def adopt(self, request: CastRequest) -> None:
        """Take the addresses of a request that fits. Not collective. Nothing has changed when it raises."""
        before, self._request = self._request, request
        try:
            self._take_addresses()
        except Exception:
            self._request = before
            raise

    def let_go(self) -> None:
        """Keep no master and no shard buffer, only their addresses."""
        request = self._request
        request.masters, request.shard_codes = [None] * len(request.records), None
        self.addresses = self._present_addresses(hold=False)


_MESSAGES = {
    PEER_ERROR: PEER_MESSAGE,
    PLAN_MISMATCH: "the ranks are running different cast plans; no rank changed a weight",
    GATHER_REFUSED: "rank {rank} could not take part in all_gather(); no rank changed a weight",
    GATHER_WITHOUT_STEP: "all_gather() came after a step that did not take place; no rank changed a weight",
}

_retired: list[tuple[torch.cuda.Event, torch.Tensor]] = []
"""Pinned words of plans that are gone, with the end of what was queued to write them: torch does not know
that kernels write to them, and would give the memory to others.
"""


def _release_finished() -> None:
    _retired[:] = [(event, word) for event, word in _retired if not event.query()]


class StepStatus:
    """The word that a step or a gather leaves when the ranks did not agree, and the end of the last one.

    word: int32 [1] on the CPU, pinned for a GPU, that the device writes and only take() clears.
    """

    def __init__(self, device: torch.device):
        self._device = device
        on_gpu = device.type == "cuda"
        self.word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        # A plain read of the memory: every step looks at it.
        self._value = ctypes.c_int32.from_address(self.word.data_ptr())
        self._done = torch.cuda.Event() if on_gpu else None
        self._handle: int | None = None
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            _release_finished()

    def __del__(self) -> None:
        if getattr(self, "_done", None) is not None:
            _retired.append((self._done, self.word))

    def queued(self) -> None:
        """A whole step, or gather, is on the device's current stream, which is not being captured; on the CPU
        it has been done, and what take() returns is raised.
        """
        if self._done is None:
            self.wait()
            return
        handle = current_stream(self._device.index)
        if handle != self._handle:  # making a Stream takes the host longer than recording the event
            self._handle, self._stream = handle, torch.cuda.current_stream(self._device)
        self._done.record(self._stream)

    def take(self) -> RuntimeError | None:
        """What kept the ranks from writing in a step or gather that is done, once. Waits for nothing."""
        status = self._value.value
        if status == 0:
            return None
        self._value.value = 0
        rank, kind = divmod(status, 1 << STATUS_RANK_SHIFT)
        return RuntimeError(_MESSAGES[kind].format(rank=rank))

    def wait(self) -> None:
        """Wait for the last one and raise what take() returns; nothing while a CUDA graph is captured."""
        if is_capturing(self._device):
            return
        if self._done is not None:
            self._done.synchronize()
        OwnError(self.take()).raise_if_any()
