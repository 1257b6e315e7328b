"""Casting sharded FP32 master weights to NVFP4: CastPlan, and the function that finds its plan by itself."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4 import collectives, storage
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div
from zerofp4.ops import HEADER_WORDS, PEER_ERROR, CastItem, CastStages, TransposeStage
from zerofp4.request import (
    PLANS_PER_WEIGHT,
    CastRequest,
    attached,
    attempt,
    check_agreement,
    check_request,
    same_records,
    weight_name,
)
from zerofp4.shard import Shard
from zerofp4.tensor import NVFP4Tensor


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
        request, error = attempt(
            check_request,
            model_weights,
            master_weights,
            start_offsets,
            fsdp_shard_model_weights,
            amax_groups,
            on_nonfinite,
            found_inf,
        )
        self._build(request, error, group)

    @classmethod
    def _from_request(cls, request: CastRequest | None, error: Exception | None, group) -> "CastPlan":
        plan = cls.__new__(cls)
        plan._build(request, error, group)
        return plan

    def _build(self, request: CastRequest | None, error: Exception | None, group) -> None:
        self.group = collectives.GroupReference(group)
        signatures = collectives.exchange(request.signature() if request else None, error, group)
        self._request = request
        self._names = [weight_name(i, record) for i, record in enumerate(request.records)]
        self._rank_shards = [[Shard(*shard) for shard in signature[-1]] for signature in signatures]
        check_agreement(signatures, self._names)
        for i, name in enumerate(self._names):
            collectives.check_disjoint(name, [of_rank[i] for of_rank in self._rank_shards])
        self._hash = int.from_bytes(hashlib.sha256(repr(signatures).encode()).digest()[:3], "big")
        self._allocate()
        self._gather = None
        self.refresh()

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
        self.found_inf = torch.zeros(1, device=device) if request.found_inf is None else request.found_inf
        self._status = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def refresh(self) -> None:
        """Take the addresses of masters, codes and scales anew, after any of them moved. Not collective."""
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
        self._shard_tensors = [m for m in request.masters if m is not None]
        self._shard_tensors += [codes for codes in request.shard_codes or () if codes is not None]
        self._shard_pointers = [tensor.data_ptr() for tensor in self._shard_tensors]
        if self._gather is not None:
            self._gather.bind([record.rowwise_data for record in request.records])

    def step(self) -> None:
        """Amax, one MAX all-reduce, scales, codes. Every rank of the group must call it.

        On a GPU it only queues work on the current stream and can be captured in a CUDA graph. Where this
        rank cannot take part (storage moved: RuntimeError) it still joins the reduction, flagged, so that no
        rank writes; the others raise RuntimeError at their next check: on the CPU in this call, on a GPU in
        check(), all_gather(), post() or the next step().
        """
        self._step(self._find_error())

    def _find_error(self) -> Exception | None:
        if self._status.item():
            return self._take_status()
        moved = self._find_moved()
        if moved is not None:
            return RuntimeError(
                f"{moved} has moved since the plan was built; call refresh() to take its new address"
            )
        return None

    def _find_moved(self) -> str | None:
        """The first tensor whose address is not the plan's any more."""
        if self._rebindings != storage.rebindings():
            for name, record, pointer in zip(
                self._names, self._request.records, self._code_pointers, strict=True
            ):
                if record.rowwise_data.data_ptr() != pointer:
                    return f"{name}: rowwise_data"
            self._rebindings = storage.rebindings()
        if list(map(torch.Tensor.data_ptr, self._shard_tensors)) != self._shard_pointers:
            for i, master in enumerate(self._request.masters):
                if master is not None and master.data_ptr() not in self._shard_pointers:
                    return f"master_weights[{i}]"
            return "a shard"
        return None

    def _step(self, error: Exception | None) -> None:
        self._stages.begin(error is not None)
        if error is None:
            self._stages.amax()
        collectives.reduce_max(self._reduced, self.group())
        if error is not None:
            raise error
        self._stages.scale()
        self._stages.cast()
        if self._done is None:
            self.check()
        elif not torch.cuda.is_current_stream_capturing():
            self._done.record()
        if self._request.on_nonfinite == "raise":
            self.check()
            self._raise_nonfinite()

    def check(self) -> None:
        """Wait for the last step and raise RuntimeError if a rank kept all from writing in it.

        Does nothing while a CUDA graph is being captured.
        """
        if self._done is not None:
            if torch.cuda.is_current_stream_capturing():
                return
            self._done.synchronize()
        if self._status.item():
            raise self._take_status()

    def _take_status(self) -> RuntimeError:
        status = self._status.item()
        self._status.zero_()
        if status == PEER_ERROR:
            return RuntimeError("another rank could not take part in the cast; no rank changed a weight")
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
        """Give every rank the codes of all shards. Raises ValueError if an element is owned by no rank, or if
        codes go to fsdp_shard_model_weights, which are the caller's to gather. Collective; waits for the
        step.
        """
        self.check()
        if self._gather is None:
            if self._request.shard_codes is not None:
                raise ValueError("the codes are in fsdp_shard_model_weights: gather those")
            numels = [record.shape.numel() for record in self._request.records]
            collectives.check_ownership(self._names, numels, self._rank_shards)
            buffers = [record.rowwise_data for record in self._request.records]
            self._gather = collectives.PackedGather(
                buffers, self._rank_shards, self.group(), self._request.device
            )
        self._gather.run(agree=False)

    def post(self) -> None:
        """Columnwise data of every weight that has some, from its rowwise data. One launch."""
        self.check()
        self._transposes.run()

    def fits(self, request: CastRequest, group: dist.ProcessGroup | None) -> bool:
        """Whether this plan, with refreshed addresses, is the plan of that request."""
        mine = self._request
        return (
            self.group.refers_to(group)
            and len(request.records) == len(mine.records)
            and all(a is b for a, b in zip(request.records, mine.records, strict=True))
            and request.shards == mine.shards
            and request.amax_groups == mine.amax_groups
            and request.on_nonfinite == mine.on_nonfinite
            and request.found_inf is mine.found_inf
        )

    def use(self, request: CastRequest) -> None:
        """Take the masters and shard buffers of a request that fits."""
        self._request = request
        moved = self._find_moved() is not None
        masters = [m for m in request.masters if m is not None]
        codes = [c for c in request.shard_codes or () if c is not None]
        if moved or [tensor.data_ptr() for tensor in masters + codes] != self._shard_pointers:
            self.refresh()
        else:
            self._shard_tensors = masters + codes


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
    if not manual_post_all_gather_processing:
        raise ValueError(
            "manual_post_all_gather_processing=False is not supported: gather the codes, then call "
            "post_all_gather_processing"
        )
    group = collectives.resolve_group(group)
    request, error = attempt(
        check_request,
        model_weights,
        master_weights,
        start_offsets,
        fsdp_shard_model_weights,
        amax_groups,
        on_nonfinite,
        found_inf,
    )
    plans = attached(model_weights, "cast_plans")
    if error is not None:
        for plan in reversed(plans):
            if plan.group.refers_to(group) and same_records(model_weights, plan._request.records):
                plan._step(error)
        CastPlan._from_request(None, error, group)
    plan = next((plan for plan in plans if plan.fits(request, group)), None)
    if plan is None:
        plan = CastPlan._from_request(request, None, group)
        plans.append(plan)
        del plans[:-PLANS_PER_WEIGHT]
    else:
        plan.use(request)
    plan.step()
