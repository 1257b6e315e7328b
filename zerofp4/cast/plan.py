"""Casting sharded master weights to NVFP4: CastPlan, a step of it stage by stage."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from zerofp4 import distributed
from zerofp4.cast.addresses import ShardAddresses, WeightAddresses
from zerofp4.cast.reduced_vector import Amaxes, MasterPiece, ReducedVector
from zerofp4.cast.request import CastRequest, check_refresh, check_request
from zerofp4.cast.signature import Signature, check_agreement, signature_of
from zerofp4.cast.status import StepStatus
from zerofp4.distributed import PackedGather, attempt
from zerofp4.ops import CastItem, CastStages, TransposeStage, target_of
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage
from zerofp4.tensors import NVFP4Tensor


class CastPlan:
    """Casts a list of sharded masters into a list of NVFP4 weights, any number of times.

    model_weights: NVFP4Tensors with block (16, 16), the same list on every rank.
    master_weights[i]: the 1D float32 or bfloat16 elements of weight i that this rank owns, start_offsets[i]
    the flat index of the first one; None and None where it owns nothing. Any offset and length will do, also
    inside a tile or a byte; no element may be owned twice. An element that no rank owns keeps its code and
    does not count for the amax. bfloat16 masters give the bytes of the same values in float32.

    group: process group that the masters are sharded over; None is the default group, or a world of one where
    torch.distributed is not initialized.
    fsdp_shard_model_weights[i]: 1D uint8 of (start + n + 1) // 2 - start // 2 bytes that the codes go to
    instead of the weight's rowwise_data; scales and amax still go to the weight.
    amax_groups: lists of weights that share one amax (each keeps a copy of it).
    on_nonfinite: "skip" leaves the weights of an amax group with a NaN or Inf master as they were, on every
    rank, and sets found_inf; "raise" does so too, then synchronizes and raises FloatingPointError naming the
    weights.
    found_inf: float32 [1] on the weights' device, set to 1 when something was skipped and never cleared; the
    plan has one of its own (`plan.found_inf`) if none is given.

    reduced: float32 vector that a step reduces by maximum over the ranks: header words, one amax per amax
    group, then the tile amaxes of each weight.

    A CUDA graph that step() or post() is captured in uses, in every replay, the storage of the capture:
    codes, masters, shard buffers and found_inf. The plan keeps that alive, also after refresh(), and must
    itself live as long as the graph. After refresh() capture again: a replay does not see the new storage.

    Building is collective: every rank must build the same plan. An invalid argument on any rank raises the
    same ValueError or TypeError on all of them. Ranks that build or step different lists of weights have no
    plan in which to find that out if their vectors differ in length: then the process group's timeout ends
    the wait.
    """

    def __init__(
        self,
        model_weights: Sequence[NVFP4Tensor],
        master_weights: Sequence[torch.Tensor | None],
        start_offsets: Sequence[int | None],
        group: dist.ProcessGroup | None = None,
        *,
        fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
        amax_groups: Sequence[Sequence[NVFP4Tensor]] | None = None,
        on_nonfinite: str = "skip",
        found_inf: torch.Tensor | None = None,
    ):
        group = distributed.resolve_group(group)
        options = (fsdp_shard_model_weights, amax_groups, on_nonfinite, found_inf)
        self._build(*attempt(check_request, model_weights, master_weights, start_offsets, *options), group)

    def _build(self, request: CastRequest | None, error: Exception | None, group) -> None:
        self.group = distributed.GroupReference(group)
        if error is None:
            # What this rank cannot run must be known to all before any waits for the others.
            _, error = attempt(target_of, request.device)
        gathered = distributed.exchange(request and tuple(signature_of(request)), error, group)
        signatures = [Signature(*signature) for signature in gathered]
        check_agreement(signatures)
        self._request = request
        self._names = [name for name, *_ in signatures[0].weights]
        self._rank_shards = [[Shard(*shard) for shard in signature.shards] for signature in signatures]
        self._into_weights = all(signature.into_weights for signature in signatures)
        for i, name in enumerate(self._names):
            distributed.check_disjoint(name, [of_rank[i] for of_rank in self._rank_shards])
        self._sharded = len(signatures) > 1
        self._allocate()
        plan_hash = int.from_bytes(hashlib.sha256(repr(signatures).encode()).digest()[:3], "big")
        options = {"hash": plan_hash, "found_inf": self.found_inf, "status": self._status.word}
        self._stages = CastStages(self._items(), self.reduced, **options)
        self._transposes = TransposeStage(self._transpose_pairs())
        self._watch_addresses()
        self._amaxes = Amaxes.NONE
        self._gather = None
        self._captured: dict[int, torch.Tensor] = {}

    def _allocate(self) -> None:
        """The reduced vector and the flags."""
        request, device = self._request, self._request.device
        self._vector = ReducedVector(request.records, request.amax_groups, device)
        self.reduced = self._vector.words
        self._own_found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        self.found_inf = self._own_found_inf if request.found_inf is None else request.found_inf
        self._status = StepStatus(device)

    @property
    def records(self) -> list[NVFP4Storage]:
        return self._request.records

    def refresh(self) -> None:
        """Take the addresses of weights, masters and shard buffers anew, after any of them moved. Amaxes left
        by an update are taken back. Not collective; only queues work on the current stream. CUDA graphs that
        were captured before keep using the old addresses: capture again.

        Raises TypeError or ValueError for what the plan could not have been built with, or when a weight has
        another shape, dtype or device than it was built for, or a master another length.
        """
        check_refresh(self._request, self._names)
        self._amaxes = Amaxes.NONE
        self._take_addresses()

    def _take_addresses(self) -> None:
        self._stages.bind(self._items(), self.found_inf)
        self._transposes.bind(self._transpose_pairs())
        self._watch_addresses()

    def _watch_addresses(self) -> None:
        request = self._request
        self._weights = WeightAddresses(self._names, request.weights, request.records)
        self._shards = ShardAddresses(request.shard_tensors())

    def _items(self) -> list[CastItem]:
        request = self._request
        return [
            CastItem(
                record, request.masters[i], request.shards[i], request.codes(i), *self._vector.offsets(i)
            )
            for i, record in enumerate(request.records)
        ]

    def _transpose_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        records = self._request.records
        return [(r.rowwise_data, r.columnwise_data) for r in records if r.columnwise_data is not None]

    def master_pieces(self) -> list[MasterPiece]:
        """What this rank owns, one piece per weight, for an optimizer that leaves amaxes in `reduced`.

        Raises RuntimeError for the plan of cast_master_weights_to_nvfp4, which holds no masters.
        """
        pieces = []
        for item in self._items():
            if item.shard.numel and item.master is None:
                raise RuntimeError("this plan holds no masters between calls: build a CastPlan of your own")
            if item.shard.numel:
                record = item.record
                offsets = (item.tile_offset, item.amax_offset)
                pieces.append(MasterPiece(item.master, item.shard, record.matrix, record.dtype, *offsets))
        return pieces

    def begin_update(self) -> None:
        """Clear `reduced` and write its header: the amaxes of every piece of master_pieces() may go in now.

        Amaxes that were left before are taken back. Queued on the current stream.
        """
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
        self._amaxes = Amaxes.CAPTURED if self._status.is_capturing() else Amaxes.LEFT

    def step(self) -> None:
        """Amax (unless an update left it), one MAX all-reduce, scales, codes. Every rank of the group must
        call it. The weights are complete, and their autograd versions advance, in post().

        Takes the host the same time for any number of weights. On a GPU it only queues work on the current
        stream, allocates nothing and can be captured in a CUDA graph, which then does in each replay what the
        captured step did, with or without its own amaxes.

        A weight that was rebound (rowwise_data or .data assigned, another record) is noticed here. Masters
        and shard buffers whose storage was exchanged (.data assigned) are looked at 256 in each step, in
        turn, and all in check(), all_gather() and post(); until it is noticed, a step uses the storage that
        the plan knows and keeps alive (unless it was freed in place, by resize_ of the storage itself). A
        step that is being captured looks at everything.

        Where this rank cannot take part (storage moved: RuntimeError) it still joins the reduction, flagged,
        so that no rank writes; the others raise RuntimeError at their next check: on the CPU in this call, on
        a GPU in check(), all_gather(), post() or, once it has done its own work, the next step().
        """
        # What went wrong in an earlier step is old news to other ranks: this step is not to fail for it.
        late = self._status.take()
        self._run(self._weights.glance() or self._shards.glance())
        if late is not None:
            raise late

    def _run(self, error: Exception | None, borrowed: Iterable[torch.Tensor | None] = ()) -> None:
        """borrowed: what this step uses and the plan does not hold."""
        capturing = self._status.is_capturing()
        if capturing and error is None:
            error = self._find_moved()
        if error is not None:
            self._abstain()
            raise error
        raises = self._request.on_nonfinite == "raise"
        if raises and capturing:
            raise RuntimeError("on_nonfinite='raise' waits for the step, which a CUDA graph cannot capture")
        if capturing:
            self._hold(borrowed)
        target = self._stages.target()
        if self._amaxes is not (Amaxes.CAPTURED if capturing else Amaxes.LEFT):
            self._stages.begin_amax(target)
        self._amaxes = Amaxes.NONE
        self._reduce()
        self._stages.scale_cast(target)
        if not capturing:
            self._status.step_queued()
        if raises:
            self._status.wait()
            self._raise_nonfinite()

    def _hold(self, borrowed: Iterable[torch.Tensor | None]) -> None:
        """Keep alive what the graph that is being captured will use."""
        self._stages.hold()
        buffers = [buffer for record in self.records for _, buffer in record.buffers()]
        used = [*buffers, *self._request.shard_tensors().values(), self.found_inf, *borrowed]
        self._captured.update((tensor.data_ptr(), tensor.detach()) for tensor in used if tensor is not None)

    def _reduce(self) -> None:
        if self._sharded:
            distributed.reduce_max(self.reduced, self.group())

    def _abstain(self) -> None:
        """Join the reduction, flagged, so that no rank writes."""
        self._amaxes = Amaxes.NONE
        self._stages.begin(error=True)
        self._reduce()

    def check(self) -> None:
        """Wait for the last step and raise RuntimeError if a rank kept all from writing in it, or if any
        weight, master or shard buffer has moved since the plan took its address.

        Does not wait while a CUDA graph is being captured, nor for the replay of one, which leaves no mark to
        wait for: synchronize with the replay first, then its errors are raised here.
        """
        self._status.wait()
        error = self._find_moved()
        if error is not None:
            raise error

    def _find_moved(self) -> RuntimeError | None:
        return self._weights.find_moved() or self._shards.find_moved()

    def _raise_nonfinite(self) -> None:
        if not self._vector.has_nonfinite():
            return
        bad = [self._names[i] for i in self._vector.nonfinite_weights()]
        # The others were written, and post() may never come.
        torch.autograd.graph.increment_version(self._request.weights)
        raise FloatingPointError(
            f"master weights with NaN or Inf (after rounding to the weight's dtype): {', '.join(bad)}; "
            "these weights and their amax groups were not changed"
        )

    def all_gather(self) -> None:
        """Give every rank the codes of all shards. Collective; waits for the step.

        Raises ValueError if an element is owned by no rank, or if codes went to fsdp_shard_model_weights,
        which are the caller's to gather; RuntimeError on all ranks if a weight or master has moved on one.
        """
        self._status.wait()
        if not self._into_weights:
            raise ValueError("the codes of some ranks are in fsdp_shard_model_weights: gather those")
        buffers = [record.rowwise_data for record in self._request.records]
        if self._gather is None:
            numels = [record.shape.numel() for record in self._request.records]
            distributed.check_ownership(self._names, numels, self._rank_shards)
            device = self._request.device
            self._gather = PackedGather(buffers, self._rank_shards, self.group(), device)
        self._gather.bind_if_moved(buffers)
        self._gather.run(error=self._find_moved())

    def post(self) -> None:
        """Columnwise data of every weight that has some, from its rowwise data, in one launch; with it the
        weights are complete. Waits for the step.

        The weights' autograd versions advance: as after any update in place, a backward pass through the old
        values fails. (Not in the replay of a CUDA graph.) Raises RuntimeError as check() does.
        """
        self.check()
        self._transposes.run()
        torch.autograd.graph.increment_version(self._request.weights)
