"""CastPlan: casting sharded master weights to NVFP4, step after step."""

import ctypes
import dataclasses
import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import distributed, ops
from zerofp4.cast.reduced_vector import ReducedVector
from zerofp4.cast.request import CastRequest, check_refresh, check_request, matrix_name
from zerofp4.cast.scales import gathered_buffers, gathered_shards, travelling_scales, travelling_shards
from zerofp4.cast.signature import Signature, check_agreement, describe, plan_hash
from zerofp4.distributed import GroupReference, OwnError, PackedGather, Pending, attempt
from zerofp4.storage import NVFP4Storage

REDUCTION = "reducing the amaxes of a cast"
"""The stage of a step's one collective."""

_built: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many plans this rank has begun to build in a group."""


class Amaxes(enum.Enum):
    """State of the amaxes in the reduced vector. BEGUN: begin_update() was called. LEFT: computed, valid for
    the next step. CAPTURED: computed in a CUDA graph, valid only for a step captured in the same graph.
    """

    NONE, BEGUN, LEFT, CAPTURED = range(4)


class CastPlan:
    """Casts sharded master weights into NVFP4 weights, once in each step().

    model_weights: NVFP4Tensors or their records, the same list on every rank. A stack [E, N, K] counts as E
        weights, each with its own amax, amax group and skipping.
    master_weights: the elements of each weight that this rank owns, 1D float32 or bfloat16 (with the bytes of
        the same values in float32); None for nothing.
    start_offsets: the flat index of each first element, None for nothing. A shard may begin and end anywhere,
        inside a tile, a byte or an expert, except with four over six: whole blocks, or whole rows of tiles.
        No element may have two owners; one without an owner keeps its code and does not count for the amax.
    group: the process group that the masters are sharded over. None is the default group, or one rank alone
        if torch.distributed is not initialized (RuntimeError if a launcher started several ranks).
    fsdp_shard_model_weights: 1D uint8 buffers of (start + n + 1) // 2 - start // 2 bytes. Codes go there
        instead of to the weights' rowwise_data; scales and amaxes still go to the weights.
    amax_groups: lists of weights that share one amax. Stacks in a group have one E and share by expert.
    on_nonfinite: "skip" leaves the weights of an amax group with a NaN or Inf master as they were, on every
        rank, and sets found_inf. "raise" also waits for the device and raises FloatingPointError by name.
    found_inf: float32 [1] on the weights' device, set to 1 if something was skipped, and never cleared. None
        makes one, `plan.found_inf`.

    Examples:
        >>> weight = zerofp4.empty((64, 64))
        >>> master = torch.randn(64 * 64)
        >>> plan = zerofp4.CastPlan([weight], [master], [0])
        >>> plan.step()  # after each update of the masters
        >>> plan.all_gather()
        >>> plan.post()

    Building is collective: an invalid argument on any rank raises the same ValueError or TypeError on all.
    docs/failures.md says who raises what, and what is left to the process group's timeout.

    A CUDA graph that captures step(), all_gather() or post() uses the storage of the capture in every replay.
    The plan keeps it alive, and must live as long as the graph. After refresh() capture again.
    """

    def __init__(
        self,
        model_weights: Sequence[Any],
        master_weights: Sequence[torch.Tensor | None],
        start_offsets: Sequence[int | None],
        group: dist.ProcessGroup | None = None,
        *,
        fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
        amax_groups: Sequence[Sequence[Any]] | None = None,
        on_nonfinite: str = "skip",
        found_inf: torch.Tensor | None = None,
    ):
        group = distributed.resolve_group(group)
        options = (fsdp_shard_model_weights, amax_groups, on_nonfinite, found_inf)
        self._build(*attempt(check_request, model_weights, master_weights, start_offsets, *options), group)

    @classmethod
    def of(cls, request: CastRequest | None, error: OwnError, group: dist.ProcessGroup | None) -> "CastPlan":
        """A plan from the result of attempt(check_request, ...), in a group or a world of one."""
        plan = cls.__new__(cls)
        plan._build(request, error, group)
        return plan

    def _build(self, request: CastRequest | None, error: OwnError, group: dist.ProcessGroup | None) -> None:
        """An error on any rank is raised on all of them."""
        if not error:
            # Exchange whether this rank can run at all before any rank waits for it.
            _, error = attempt(ops.target_of, request.device)
        number = 0
        if group is not None:
            _built[group] = number = _built.get(group, 0) + 1
        signature = None
        if request is not None:
            asked = request.amax_groups, request.on_nonfinite, number
            into_weights = request.shard_codes is None
            signature = Signature(describe(request.records), *asked, request.shards, into_weights)
        signatures = distributed.exchange(signature, error, group, "building a CastPlan")
        check_agreement(signatures)

        self.group = GroupReference(group)
        self._request, self._device = request, request.device
        self._sharded = len(signatures) > 1
        self._names = [name for name, *_ in signatures[0].weights]
        self._rank_shards = [signature.shards for signature in signatures]
        for i, name in enumerate(self._names):
            distributed.check_disjoint(name, [of_rank[i] for of_rank in self._rank_shards])
        self._into_weights = all(signature.into_weights for signature in signatures)
        """Whether every rank's codes go to the weights, and not to fsdp_shard_model_weights."""
        self._vector = ReducedVector(request.records, request.amax_groups, self._rank_shards, request.device)
        self.reduced = self.wire = self._vector.words
        """The vector that a step reduces by maximum, float32; and what travels, with the same values."""
        if self._sharded and {record.dtype for record in request.records} == {torch.bfloat16}:
            # Exact: masters are rounded to the weights' dtype first, so amaxes are bfloat16 values or +inf,
            # and the header has bytes.
            self.wire = torch.zeros_like(self.reduced, dtype=torch.bfloat16)
        self._amaxes = Amaxes.NONE
        self._travelling: Pending | None = None
        """The reduction that start_step() began."""
        self._own_found_inf = torch.zeros(1, dtype=torch.float32, device=request.device)
        self._status = StepStatus(request.device)
        self._hash = plan_hash(signatures)
        self._stages, self._post = ops.NativePlan(request.device), ops.PostStage(request.device)
        self._gather: PackedGather | None = None
        """Made by the first all_gather()."""
        self._scale_gather: PackedGather | None = None
        """Made by stage_scales()."""
        self._take_addresses()
        self._stages.run("begin", False)  # a gather before the first step finds nothing wrong with it

    @property
    def records(self) -> list[NVFP4Storage]:
        return self._request.records

    @property
    def found_inf(self) -> torch.Tensor:
        """float32 [1], 1 once a step has skipped something."""
        given = self._request.found_inf
        return self._own_found_inf if given is None else given

    def __repr__(self) -> str:
        records, request = self.records, self._request
        elements = sum(record.shape.numel() for record in records)
        own = sum(shard.numel for shard in request.shards)
        return (
            f"CastPlan(weights={len(records)}, elements={elements}, on_this_rank={own}, "
            f"ranks={len(self._rank_shards)}, amax_groups={len(set(request.amax_groups))}, "
            f"device={str(self._device)!r}, on_nonfinite={request.on_nonfinite!r})"
        )

    def step(self) -> None:
        """Amax (unless an update left it), one MAX all-reduce, scales, codes. Every rank of the group must
        call it. The weights are complete, and their autograd versions advance, in post().

        On a GPU it only queues work on the current stream, allocates nothing, and takes the same host time
        for any number of weights. A CUDA graph can capture it, with or without its own amaxes.

        Moved storage is noticed before anything is read or written: on the CPU all of it, on a GPU rebound
        weights, and the rest in check(), post() and a captured step. A rank that cannot take part
        (RuntimeError) still joins the reduction, flagged, so that no rank writes. The others raise
        RuntimeError: on the CPU in this call, on a GPU in check() or a later step() (docs/failures.md).
        """
        self.run(OwnError(self.addresses.glance())).raise_if_any()

    def all_gather(self) -> None:
        """Give every rank the codes of all shards. Collective; only queues work on a GPU.

        Moved storage is noticed as in step(). If a rank cannot give its codes, for that or because a step did
        not take place, no rank changes a weight, and all raise RuntimeError as in step().

        Raises ValueError if no rank owns an element, or if codes went to fsdp_shard_model_weights.
        """
        every = self._gather is None  # it takes addresses of its own
        if self._gather is None:
            self._gather = self._build_gather()
        capturing = self._sharded and ops.is_capturing(self._device)
        moved = self.find_moved() if every or capturing else self.addresses.glance()
        self._gather.queue(OwnError(moved))
        if self._sharded and not capturing:
            self._status.queued()

    def post(self) -> None:
        """Complete the weights: columnwise data from rowwise data, in one launch. Only queues work on a GPU.

        The weights' autograd versions advance: a backward pass through the old values fails, as after any
        update in place. (Not in the replay of a CUDA graph.) Raises RuntimeError if a weight, master or shard
        buffer has moved. Errors of other ranks are raised by check() or a later step().
        """
        OwnError(self.find_moved()).raise_if_any()
        self.complete()

    def check(self) -> None:
        """Wait for the last step or gather. Raises RuntimeError if a rank kept all from writing, or if a
        weight, master or shard buffer has moved since the plan took its address.

        Does not wait while a CUDA graph is being captured, nor for a replay, which leaves no mark to wait
        for: synchronize with the replay first, then its errors are raised here.
        """
        self._status.wait()
        OwnError(self.find_moved()).raise_if_any()

    def refresh(self, master_weights: Sequence[torch.Tensor | None] | None = None) -> None:
        """Take the addresses of weights, masters and shard buffers anew, after any of them moved. Discards
        amaxes that an update left. Not collective; only queues work on the current stream.

        master_weights: tensors of the same lengths that have replaced the masters.

        Raises TypeError or ValueError for tensors that the plan could not be built with, or if a weight's
        shape, dtype or device, or a master's length, has changed.
        """
        request = dataclasses.replace(self._request)
        if master_weights is not None:
            owned = zip(master_weights, request.shards, strict=True)
            request.masters = [master if shard.numel else None for master, shard in owned]
        check_refresh(request, self._names)
        self._amaxes = Amaxes.NONE
        self.adopt(request)

    # The stages of a step, for callers that queue other work between them: the engine, FSDP2, FusedAdamW

    def master_pieces(self) -> list[ops.MasterPiece]:
        """This rank's pieces, one per matrix, for an optimizer that leaves amaxes in `reduced`. The pieces of
        the experts of a weight are adjacent, also in its master.

        Raises ValueError for a weight with blocks that shards cut: no optimizer leaves their amaxes.
        """
        for i, name in enumerate(self._names):
            if cut := self._vector.cut(i):
                raise ValueError(
                    f"{name} has {cut} blocks of 1x16 that shards cut: an optimizer leaves amaxes where "
                    "shards begin and end between blocks"
                )
        items = self._vector.items(self._request)
        return [item.piece for item in items if item.piece.shard.numel]

    def begin_update(self) -> None:
        """Clear `reduced` and write its header: the amaxes of master_pieces() may go in now. Only queued."""
        self._settle()
        self._stages.run("begin", False)
        self._amaxes = Amaxes.BEGUN

    def end_update(self) -> None:
        """Mark the amaxes in `reduced` as valid for the next step(), which then does not compute them.
        begin_update(), refresh(), a step that this rank abstains from, and capturing only one of update and
        step in a CUDA graph invalidate them.

        Do not write to masters between this call and step(): codes would not match their scales. Raises
        RuntimeError without a begin_update() since the last step.
        """
        if self._amaxes is Amaxes.NONE:
            raise RuntimeError("end_update() without begin_update() since the last step or refresh()")
        self._amaxes = Amaxes.CAPTURED if ops.is_capturing(self._device) else Amaxes.LEFT

    def run(self, error: OwnError, borrowed: Iterable[torch.Tensor | None] = ()) -> OwnError:
        """A step. A rank with an error joins the others, then raises it. Returns an earlier step's error.

        borrowed: tensors that the step uses and the plan does not hold.
        """
        late = self._take_part(error, borrowed)
        self._reduce()
        self._write()
        return late

    def start_step(self) -> RuntimeError | None:
        """The first half of step(), up to its reduction; finish_step() is the other. Every rank must begin
        its collectives in the same order. Raises as step(), with nothing left to finish; returns as run().
        """
        late = self._take_part(OwnError(self.addresses.glance()), ())
        if self._sharded:
            self._pack()
            self._travelling = distributed.start_reduce_max(self.wire, self.group(), REDUCTION)
        return late.take()

    def finish_step(
        self,
        halfway: tuple[int, int, Callable[[], object]] | None = None,
        write_codes: Callable[[], object] | None = None,
    ) -> None:
        """halfway: a weight's position, one of its rows (of the E * N of a stack) or their number, and a
        function to call once the codes before that row are queued.
        write_codes: called instead of the cast, by a caller with the masters, to queue copies of this rank's
            codes and scales that travel.
        """
        self._settle()
        self._write(halfway, write_codes)

    def _settle(self) -> None:
        """Wait for a reduction in flight, also of a step that was left between its halves."""
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            distributed.in_phase("amaxes", travelling.wait)()
            self._unpack()

    def _take_part(self, error: OwnError, borrowed: Iterable[torch.Tensor | None]) -> OwnError:
        """Put this rank's amaxes into the vector, or raise the error once the others have heard of it."""
        self._settle()
        late = OwnError(self._status.take())
        if late:
            message = f"an earlier call had no effect: {late.take()}. This step took place"
            late = OwnError(RuntimeError(message))
        capturing = ops.is_capturing(self._device)
        if capturing and not error:
            error = OwnError(self.find_moved())
        if error:
            self.abstain()
            error.raise_if_any(late.take())
        if self._request.on_nonfinite == "raise" and capturing:
            raise RuntimeError("on_nonfinite='raise' waits for the step, which a CUDA graph cannot capture")
        if capturing:
            buffers = [buffer for record in self.records for _, buffer in record.buffers()]
            tensors = self._request.shard_tensors().values()
            self._stages.hold([*buffers, *tensors, self.found_inf, *borrowed])
        if self._amaxes is not (Amaxes.CAPTURED if capturing else Amaxes.LEFT):
            self._stages.run("begin_amax")
        self._amaxes = Amaxes.NONE
        return late

    def _write(
        self,
        halfway: tuple[int, int, Callable[[], object]] | None = None,
        write_codes: Callable[[], object] | None = None,
    ) -> None:
        if write_codes is not None:
            self._stages.run("scale")
            write_codes()
        elif halfway is None:
            self._stages.run("scale_cast")
        else:
            position, row, between = halfway
            matrix = sum(record.experts or 1 for record in self.records[:position])
            if row and self.records[position].experts is not None:
                more, row = divmod(row, self.records[position].matrix[0])
                matrix += more
            self._stages.run("scale")
            self._stages.run("cast_before", matrix, row)
            between()
            self._stages.run("cast_from", matrix, row)
        if self._scale_gather is not None:
            self._scale_gather.pack()
        if not ops.is_capturing(self._device):
            self._status.queued()
        if self._request.on_nonfinite == "raise":
            self._status.wait()
            self._raise_nonfinite()

    @property
    def held_for_graphs(self) -> bool:
        """Whether a captured CUDA graph uses the plan."""
        return bool(self._stages.captured)

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
        """Join the reduction of a step, flagged, so that no rank writes. Collective."""
        self._settle()
        self._amaxes = Amaxes.NONE
        self._stages.run("begin", True)
        self._reduce()

    def _raise_nonfinite(self) -> None:
        bad = [matrix_name(i, self.records[i], e) for i, e in self._vector.nonfinite_matrices()]
        if not bad:
            return
        # The other weights were written, and post() may never be called.
        ops.increment_versions(self._request.versioned)
        raise FloatingPointError(
            f"master weights with NaN or Inf (after rounding to the weight's dtype): {', '.join(bad)}; "
            "these weights and their amax groups were not changed"
        )

    def decline(self) -> bool:
        """Join a step to ask for another plan. Returns whether all ranks did; RuntimeError for an error."""
        self._stages.run("begin", True)
        self._vector.decline()
        self._reduce()
        declined = self._vector.declined()
        if declined is None:
            raise RuntimeError(PEER_MESSAGE)
        return declined

    # After a step

    def _build_gather(self) -> PackedGather:
        """Raises ValueError, the same on every rank, if some codes are not gathered from the ranks."""
        if not self._into_weights:
            raise ValueError("the codes of some ranks are in fsdp_shard_model_weights: gather those")
        numels = [record.shape.numel() for record in self.records]
        distributed.check_ownership(self._names, numels, self._rank_shards)
        header = ops.GatherHeader(self.reduced, self._hash, self._status.word)
        shards = [gathered_shards(self.records, of_rank) for of_rank in self._rank_shards]
        return PackedGather(
            gathered_buffers(self.records), shards, self.group(), self._request.device, header
        )

    def stage_scales(self, zeros: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """For a caller that gathers the codes itself: uint8 [ranks, bytes], made by zeros(shape, dtype). A
        step puts this rank's scales that travel there, and derive_columns() reads all. None if none travel.
        """
        travel = any(record.scales_travel for record in self.records)
        if not travel or not self._sharded:
            return None
        shards = [travelling_shards(self.records, of_rank) for of_rank in self._rank_shards]
        scales = travelling_scales(self.records)
        self._scale_gather = PackedGather(scales, shards, self.group(), self._device, zeros=zeros)
        return self._scale_gather.staging

    def complete(self) -> None:
        """post() for a caller that has compared addresses before the step."""
        self.derive_columns()
        self.note_written()

    def derive_columns(self) -> None:
        """The queued half of complete()."""
        if self._scale_gather is not None:
            self._scale_gather.unpack()
        self._post.run()

    def note_written(self) -> None:
        """The other half: from now on a backward pass through the old values fails."""
        ops.increment_versions(self._request.versioned)

    # Addresses

    def _take_addresses(self) -> None:
        items, options = self._vector.items(self._request), {"hash": self._hash, "status": self._status.word}
        ops.load_cast(self._stages, items, self.reduced, found_inf=self.found_inf, **options)
        self._post.bind(self.records)
        if self._gather is not None:
            self._gather.bind(gathered_buffers(self.records))
        if self._scale_gather is not None:
            self._scale_gather.bind(travelling_scales(self.records))
        self.addresses = self._present_addresses()

    def _present_addresses(self, *, hold: bool = True) -> ops.Addresses:
        request = self._request
        weights = dict(zip(self._names, request.weights, strict=True))
        return ops.Addresses(weights, request.shard_tensors(), hold=hold)

    def find_moved(self) -> RuntimeError | None:
        """An error for the first weight, master or buffer that has moved since the plan took its address."""
        return self.addresses.find_moved()

    # For the function that finds its plan: the same weights and shards at every call, but other tensors

    def fits(self, request: CastRequest) -> bool:
        """Whether a request for the same weights differs only in the addresses of tensors."""
        mine = self._request
        return (
            request.shards == mine.shards
            and request.amax_groups == mine.amax_groups
            and request.on_nonfinite == mine.on_nonfinite
        )

    def adopt(self, request: CastRequest) -> None:
        """Take the addresses of a request that fits. Not collective. Changes nothing if it raises."""
        before, self._request = self._request, request
        try:
            self._take_addresses()
        except Exception:
            self._request = before
            raise

    def let_go(self) -> None:
        """Keep no master and no shard buffer alive between calls, except for CUDA graphs."""
        request = self._request
        request.masters, request.shard_codes = [None] * len(request.records), None
        self.addresses = self._present_addresses(hold=False)


# What kept a step or a gather from taking place

PEER_MESSAGE = "another rank could not take part in the cast; no rank changed a weight"

_MESSAGES = {
    ops.PEER_ERROR: PEER_MESSAGE,
    ops.PLAN_MISMATCH: "the ranks are running different cast plans; no rank changed a weight",
    ops.GATHER_REFUSED: "rank {rank} could not take part in all_gather(); no rank changed a weight",
    ops.GATHER_WITHOUT_STEP: "all_gather() came after a step that did not take place; no rank "
    "changed a weight",
}

_retired: list[tuple[torch.cuda.Event, torch.Tensor]] = []
"""Pinned words of deleted plans, until the kernels that write to them, unknown to torch, are done."""


def _release_finished() -> None:
    _retired[:] = [(event, word) for event, word in _retired if not event.query()]


class StepStatus:
    """A word, int32 [1] on the CPU (pinned for a GPU), that a step or gather sets if the ranks did not agree,
    and only take() clears; and the end of the last step or gather.
    """

    def __init__(self, device: torch.device):
        self._device = device
        on_gpu = device.type == "cuda"
        self.word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        # A plain read of memory, since every step reads it.
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
        """A step or gather is queued, outside of a capture. On the CPU it is done: raise its error."""
        if self._done is None:
            self.wait()
            return
        handle = ops.current_stream(self._device.index)
        if handle != self._handle:  # making a Stream takes the host longer than recording the event
            self._handle, self._stream = handle, torch.cuda.current_stream(self._device)
        self._done.record(self._stream)

    def take(self) -> RuntimeError | None:
        """The error of a finished step or gather, once. Waits for nothing."""
        status = self._value.value
        if status == 0:
            return None
        self._value.value = 0
        rank, kind = divmod(status, 1 << ops.STATUS_RANK_SHIFT)
        return RuntimeError(_MESSAGES[kind].format(rank=rank))

    def wait(self) -> None:
        """Wait for the last one and raise what take() returns; nothing while a CUDA graph is captured."""
        if ops.is_capturing(self._device):
            return
        if self._done is not None:
            self._done.synchronize()
        OwnError(self.take()).raise_if_any()
