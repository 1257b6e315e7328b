"""Casting sharded FP32 master weights to NVFP4: CastPlan, and the function that finds its plan by itself."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4 import collectives, storage
from zerofp4.collectives import PackedGather
from zerofp4.format import BLOCK, FLOAT32_MAX
from zerofp4.layout import ceil_div
from zerofp4.ops import ERROR_WORD, HASH_WORD, HEADER_WORDS, PEER_ERROR, CastItem, CastStages, TransposeStage
from zerofp4.request import (
    CastRequest,
    Signature,
    attached,
    attempt,
    check_agreement,
    check_request,
    check_weights,
    keep,
    same_weights,
)
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage
from zerofp4.tensor import NVFP4Tensor

_PEER_MESSAGE = "another rank could not take part in the cast; no rank changed a weight"
_WANTS_ANOTHER = 1.0
"""In the error word: not an error (+inf), but a rank that wants another plan for the same weights."""


class CastPlan:
    """Casts a list of sharded FP32 masters into a list of NVFP4 weights, any number of times.

    model_weights: NVFP4Tensors with block (16, 16), the same list on every rank.
    master_weights[i]: the 1D float32 elements of weight i that this rank owns, start_offsets[i] the flat
    index of the first one; None and None where it owns nothing. Any offset and length will do, also inside a
    tile or a byte; no element may be owned twice. An element that no rank owns keeps its code and does not
    count for the amax.

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
        group = collectives.resolve_group(group)
        options = (fsdp_shard_model_weights, amax_groups, on_nonfinite, found_inf)
        self._build(*attempt(check_request, model_weights, master_weights, start_offsets, *options), group)

    @classmethod
    def _from_request(cls, request: CastRequest | None, error: Exception | None, group) -> "CastPlan":
        plan = cls.__new__(cls)
        plan._build(request, error, group)
        return plan

    def _build(self, request: CastRequest | None, error: Exception | None, group) -> None:
        self.group = collectives.GroupReference(group)
        gathered = collectives.exchange(request and tuple(request.signature()), error, group)
        signatures = [Signature(*signature) for signature in gathered]
        check_agreement(signatures)
        self._request = request
        self._names = [name for name, *_ in signatures[0].weights]
        self._rank_shards = [[Shard(*shard) for shard in signature.shards] for signature in signatures]
        self._into_weights = all(signature.into_weights for signature in signatures)
        for i, name in enumerate(self._names):
            collectives.check_disjoint(name, [of_rank[i] for of_rank in self._rank_shards])
        self._hash = int.from_bytes(hashlib.sha256(repr(signatures).encode()).digest()[:3], "big")
        self._allocate()
        self._gather = None
        self._take_addresses()

    def _allocate(self) -> None:
        """The reduced vector (header words, one amax per group, then tile amaxes) and the flags."""
        request, device = self._request, self._request.device
        self._group_count = len(set(request.amax_groups))
        self._tile_offsets, total = [], HEADER_WORDS + self._group_count
        for record in request.records:
            rows, cols = record.matrix
            self._tile_offsets.append(total)
            total += ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK)
        self._reduced = torch.zeros(total, device=device)
        self._own_found_inf = torch.zeros(1, device=device)
        self.found_inf = self._own_found_inf if request.found_inf is None else request.found_inf
        self._status = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def records(self) -> list[NVFP4Storage]:
        return self._request.records

    def refresh(self) -> None:
        """Take the addresses of weights, masters and shard buffers anew, after any of them moved. Not
        collective.

        Raises ValueError when a weight has another shape, dtype or device than the plan was built for.
        """
        records = check_weights(self._request.weights)
        for name, old, new in zip(self._names, self._request.records, records, strict=True):
            for what in ("shape", "dtype", "device"):
                if getattr(old, what) != getattr(new, what):
                    raise ValueError(
                        f"{name} must keep its {what} {getattr(old, what)}, now has {getattr(new, what)}: "
                        "build a new plan"
                    )
        self._request.records = records
        self._take_addresses()

    def _take_addresses(self) -> None:
        request = self._request
        items = [
            CastItem(
                record,
                request.masters[i],
                request.shards[i],
                request.codes(i),
                self._tile_offsets[i],
                HEADER_WORDS + request.amax_groups[i],
            )
            for i, record in enumerate(request.records)
        ]
        self._stages = CastStages(
            items, self._reduced, hash=self._hash, found_inf=self.found_inf, status=self._status
        )
        pairs = [
            (r.rowwise_data, r.columnwise_data) for r in request.records if r.columnwise_data is not None
        ]
        self._transposes = TransposeStage(pairs)
        self._rebindings = storage.rebindings()
        self._code_pointers = [record.rowwise_data.data_ptr() for record in request.records]
        self._shard_tensors = request.shard_tensors()
        self._shard_pointers = [tensor.data_ptr() for tensor in self._shard_tensors.values()]

    def _moved_weight(self) -> RuntimeError | None:
        """An error for the first weight whose record or codes are not the plan's any more."""
        if self._rebindings == storage.rebindings():
            return None
        request = self._request
        for i, (weight, record) in enumerate(zip(request.weights, request.records, strict=True)):
            if weight.record is not record or record.rowwise_data.data_ptr() != self._code_pointers[i]:
                return _moved(f"{self._names[i]}: rowwise_data")
        self._rebindings = storage.rebindings()
        return None

    def _moved_shard(self) -> RuntimeError | None:
        """An error for the first master or shard buffer whose address is not the plan's any more."""
        tensors = self._shard_tensors.values()
        if list(map(torch.Tensor.data_ptr, tensors)) == self._shard_pointers:
            return None
        pointers = zip(self._shard_tensors.items(), self._shard_pointers, strict=True)
        return _moved(next(name for (name, tensor), pointer in pointers if tensor.data_ptr() != pointer))

    def step(self) -> None:
        """Amax, one MAX all-reduce, scales, codes. Every rank of the group must call it.

        On a GPU it only queues work on the current stream and can be captured in a CUDA graph. Where this
        rank cannot take part (storage moved: RuntimeError) it still joins the reduction, flagged, so that no
        rank writes; the others raise RuntimeError at their next check: on the CPU in this call, on a GPU in
        check(), all_gather(), post() or, once it has done its own work, the next step().
        """
        # What went wrong in an earlier step is old news to other ranks: this step is not to fail for it.
        late = self._take_status()
        self._run(self._moved_weight() or self._moved_shard())
        if late is not None:
            raise late

    def _run(self, error: Exception | None) -> None:
        if error is not None:
            self._abstain(error)
            raise error
        if self._request.on_nonfinite == "raise" and self._is_capturing():
            raise RuntimeError("on_nonfinite='raise' waits for the step, which a CUDA graph cannot capture")
        self._stages.begin()
        self._stages.amax()
        collectives.reduce_max(self._reduced, self.group())
        self._stages.scale()
        self._stages.cast()
        # As after any update in place, a backward pass through the old values must fail.
        torch.autograd.graph.increment_version(self._request.weights)
        if self._done is None:
            self.check()
        elif not self._is_capturing():
            self._done.record()
        if self._request.on_nonfinite == "raise":
            self.check()
            self._raise_nonfinite()

    def _abstain(self, error: Exception | None) -> bool:
        """Join the reduction so that no rank writes: because of an error, or wanting another plan.

        Returns whether all ranks want another plan.
        """
        self._stages.begin(error=True)
        if error is None:
            self._reduced[ERROR_WORD] = _WANTS_ANOTHER
            # Below the hash of any rank that takes part or has an error.
            self._reduced[HASH_WORD] = -FLOAT32_MAX
        collectives.reduce_max(self._reduced, self.group())
        if error is not None:
            return False
        error_word, hash_word = self._reduced[[ERROR_WORD, HASH_WORD]].tolist()
        if error_word != _WANTS_ANOTHER:
            raise RuntimeError(_PEER_MESSAGE)
        return hash_word == -FLOAT32_MAX

    def _is_capturing(self) -> bool:
        return self._done is not None and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Wait for the last step and raise RuntimeError if a rank kept all from writing in it.

        Does nothing while a CUDA graph is being captured.
        """
        if self._is_capturing():
            return
        if self._done is not None:
            self._done.synchronize()
        error = self._take_status()
        if error is not None:
            raise error

    def _take_status(self) -> RuntimeError | None:
        """What the device said of the steps that it has finished, once."""
        status = self._status.item()
        if status == 0:
            return None
        self._status.zero_()
        if status == PEER_ERROR:
            return RuntimeError(_PEER_MESSAGE)
        return RuntimeError("the ranks are running different cast plans; no rank changed a weight")

    def _raise_nonfinite(self) -> None:
        group_amaxes = self._reduced[HEADER_WORDS : HEADER_WORDS + self._group_count]
        if not group_amaxes.isinf().any():
            return
        ends = [*self._tile_offsets[1:], self._reduced.numel()]
        spans = zip(self._names, self._tile_offsets, ends, strict=True)
        bad = [name for name, first, last in spans if self._reduced[first:last].isinf().any()]
        raise FloatingPointError(
            f"master weights with NaN or Inf (after rounding to the weight's dtype): {', '.join(bad)}; "
            "these weights and their amax groups were not changed"
        )

    def all_gather(self) -> None:
        """Give every rank the codes of all shards. Collective; waits for the step.

        Raises ValueError if an element is owned by no rank, or if codes went to fsdp_shard_model_weights,
        which are the caller's to gather; RuntimeError on all ranks if a weight has moved on one.
        """
        self.check()
        if not self._into_weights:
            raise ValueError("the codes of some ranks are in fsdp_shard_model_weights: gather those")
        buffers = [record.rowwise_data for record in self._request.records]
        if self._gather is None:
            numels = [record.shape.numel() for record in self._request.records]
            collectives.check_ownership(self._names, numels, self._rank_shards)
            device = self._request.device
            self._gather = PackedGather(buffers, self._rank_shards, self.group(), device)
        self._gather.bind_if_moved(buffers)
        self._gather.run(error=self._moved_weight())

    def post(self) -> None:
        """Columnwise data of every weight that has some, from its rowwise data. One launch.

        Raises RuntimeError if a weight has moved since the plan took its address.
        """
        self.check()
        error = self._moved_weight()
        if error is not None:
            raise error
        self._transposes.run()

    def step_for(self, request: CastRequest | None, error: Exception | None) -> bool:
        """step() with the masters, shard buffers and found_inf of a request, which it does not keep.

        An error is raised on this rank and keeps the others from writing. Returns False when all ranks want
        another plan, with other shards or options; where only some do, those raise ValueError.
        """
        if error is not None or not self._fits(request):
            if self._abstain(error):
                return False
            raise error or ValueError(
                "start_offsets, lengths of master_weights, amax_groups or on_nonfinite are not those of the "
                "last call with these weights, and another rank's are: they change on all ranks or on none"
            )
        late = self._take_status()
        self._request.masters, self._request.shard_codes = request.masters, request.shard_codes
        found_inf = self._own_found_inf if request.found_inf is None else request.found_inf
        pointers = [tensor.data_ptr() for tensor in request.shard_tensors().values()]
        moved = pointers != self._shard_pointers or self._moved_weight() is not None
        if moved or found_inf is not self.found_inf:
            self.found_inf = found_inf
            self._take_addresses()
        try:
            self._run(None)
        finally:
            # Only addresses stay: whether the masters live on is the caller's business.
            self._request.masters, self._request.shard_codes = [None] * len(self.records), None
            self._shard_tensors = {}
        if late is not None:
            raise late
        return True

    def _fits(self, request: CastRequest) -> bool:
        mine = self._request
        return (
            request.shards == mine.shards
            and request.amax_groups == mine.amax_groups
            and request.on_nonfinite == mine.on_nonfinite
        )


def _moved(what: str) -> RuntimeError:
    return RuntimeError(f"{what} has moved since the plan was built; call refresh() to take its new address")


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[NVFP4Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    amax_groups: Sequence[Sequence[NVFP4Tensor]] | None = None,
    on_nonfinite: str = "skip",
    found_inf: torch.Tensor | None = None,
) -> None:
    """Cast sharded FP32 masters into NVFP4 weights: one step of the CastPlan that belongs to these arguments.

    See CastPlan for the arguments. The plan is built, collectively, when no earlier call had these weights,
    shards and options; it is kept with the first weight. Masters and buffers may have moved since: then this
    rank rebuilds its addresses, without a collective. Afterwards call all_gather_nvfp4 (or gather the shard
    buffers), then post_all_gather_processing. An argument that is invalid on one rank only raises there, and
    on the other ranks in the same way as CastPlan and CastPlan.step say; a rank that calls with other weights
    than its peers is found out by the process group's timeout only.

    Raises ValueError for manual_post_all_gather_processing=False: the columnwise copy is never made behind
    the caller's back, call post_all_gather_processing.
    """
    group = collectives.resolve_group(group)
    options = (
        fsdp_shard_model_weights,
        amax_groups,
        on_nonfinite,
        found_inf,
        manual_post_all_gather_processing,
    )
    request, error = attempt(check_request, model_weights, master_weights, start_offsets, *options)
    plans = attached(model_weights, "cast_plans")
    for plan in reversed(plans):
        if plan.group.refers_to(group) and same_weights(model_weights, plan.records):
            if plan.step_for(request, error):
                keep(plans, plan)
                return
            plans.remove(plan)
            break
    plan = CastPlan._from_request(request, error, group)
    keep(plans, plan)
    plan.step_for(request, None)
