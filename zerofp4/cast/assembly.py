"""What a cast plan is made of: an agreed request, the reduced vector, stages and the addresses they took."""

import weakref
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from zerofp4 import distributed
from zerofp4.cast.reduced_vector import Amaxes, ReducedVector
from zerofp4.cast.request import CastRequest, check_refresh
from zerofp4.cast.signature import Signature, check_agreement, plan_hash, signature_of
from zerofp4.cast.status import StepStatus
from zerofp4.distributed import OwnError, PackedGather, attempt
from zerofp4.ops import (
    Addresses,
    CastItem,
    CastStages,
    GatherHeader,
    MasterPiece,
    TransposeStage,
    target_of,
    transpose_pairs,
)
from zerofp4.shard import Shard, byte_range, intersect
from zerofp4.storage import NVFP4Storage

_built: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many plans this rank has begun to build in a group."""


Plan = TypeVar("Plan", bound="PlanParts")


class PlanParts:
    """A plan before its first step. CastPlan adds the steps, and says what everything means."""

    @classmethod
    def from_request(
        cls: type[Plan], request: CastRequest | None, error: OwnError, group: dist.ProcessGroup | None
    ) -> Plan:
        """The plan of arguments that were checked, or the error that was found. Collective."""
        plan = cls.__new__(cls)
        plan._build(request, error, group)
        return plan

    # Building

    def _build(self, request: CastRequest | None, error: OwnError, group) -> None:
        self.group = distributed.GroupReference(group)
        if not error:
            # What this rank cannot run must be known to all before any waits for the others.
            _, error = attempt(target_of, request.device)
        number = _next_number(group)
        signature = request and tuple(signature_of(request, number))
        gathered = distributed.exchange(signature, error, group, "building a CastPlan")
        signatures = [Signature(*signature) for signature in gathered]
        check_agreement(signatures)
        self._request = request
        self._names = [name for name, *_ in signatures[0].weights]
        self._rank_shards = [[Shard(*shard) for shard in signature.shards] for signature in signatures]
        self._into_weights = all(signature.into_weights for signature in signatures)
        for i, name in enumerate(self._names):
            distributed.check_disjoint(name, [of_rank[i] for of_rank in self._rank_shards])
        self._sharded = len(signatures) > 1
        self._vector = ReducedVector(
            request.records, request.amax_groups, request.device, travels=self._sharded
        )
        self.reduced, self.wire = self._vector.words, self._vector.wire
        self._own_found_inf = torch.zeros(1, dtype=torch.float32, device=request.device)
        self._status = StepStatus(request.device)
        self._captured: dict[int, torch.Tensor] = {}
        self._gather: PackedGather | None = None
        self._amaxes = Amaxes.NONE
        self._travelling: distributed.Pending | None = None
        self._hash = plan_hash(signatures)
        self._stages = CastStages(
            self._items(),
            self.reduced,
            hash=self._hash,
            found_inf=self.found_inf,
            status=self._status.word,
        )
        self._stages.begin()  # a gather before the first step finds nothing wrong with it
        self._transposes = TransposeStage(self._transpose_pairs())
        self.addresses = self._present_addresses()

    def _build_gather(self) -> PackedGather:
        """Raises ValueError, the same on every rank, where not all codes are gathered from the ranks."""
        if not self._into_weights:
            raise ValueError("the codes of some ranks are in fsdp_shard_model_weights: gather those")
        numels = [record.shape.numel() for record in self.records]
        distributed.check_ownership(self._names, numels, self._rank_shards)
        header = GatherHeader(self.reduced, self._hash, self._status.word)
        shards, device = self._rank_shards, self._request.device
        return PackedGather(self._rowwise_codes(), shards, self.group(), device, header)

    def _rowwise_codes(self) -> list[torch.Tensor]:
        return [record.rowwise.data for record in self.records]

    @property
    def records(self) -> list[NVFP4Storage]:
        return self._request.records

    @property
    def found_inf(self) -> torch.Tensor:
        given = self._request.found_inf
        return self._own_found_inf if given is None else given

    def _items(self) -> list[CastItem]:
        request, items = self._request, []
        for i, record in enumerate(request.records):
            offsets = self._vector.offsets(i)
            owned = request.shards[i], request.masters[i], request.codes(i)
            if record.experts is not None:
                items += _expert_items(record, *owned, offsets)
                continue
            shard, master, codes = owned
            piece = MasterPiece(master, shard, record.matrix, record.dtype, *offsets[0])
            items.append(CastItem(record, piece, codes))
        return items

    def _transpose_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return transpose_pairs(self._request.records)

    # Addresses

    def refresh(self, master_weights: Sequence[torch.Tensor | None] | None = None) -> None:
        """Take the addresses of weights, masters and shard buffers anew, after any of them moved. Amaxes left
        by an update are taken back. Not collective; only queues work on the current stream. CUDA graphs that
        were captured before keep using the old addresses: capture again.

        master_weights: tensors of the same lengths that have taken the places of the masters.

        Raises TypeError or ValueError for what the plan could not have been built with, or when a weight has
        another shape, dtype or device than it was built for, or a master another length.
        """
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
        self._stages.bind(self._items(), self.found_inf)
        self._transposes.bind(self._transpose_pairs())
        if self._gather is not None:
            self._gather.bind(self._rowwise_codes())
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


def _expert_items(
    record: NVFP4Storage,
    shard: Shard,
    master: torch.Tensor | None,
    codes: torch.Tensor | None,
    offsets: list[tuple[int, int]],
) -> list[CastItem]:
    """An item for each matrix of a stack, with what the shard has of it. The matrices have even sizes: no
    byte of codes belongs to two of them.
    """
    rows, cols = record.matrix
    items = []
    for e, matrix in enumerate(record.matrices()):
        first = e * rows * cols
        own = intersect(first, rows * cols, shard.start, shard.end)
        own_master = own_codes = None
        if own.numel:
            begin = first + own.start
            if master is not None:
                own_master = master[begin - shard.start :][: own.numel]
            first_byte, last_byte = byte_range(Shard(begin, own.numel))
            behind = byte_range(shard)[0]
            own_codes = codes[first_byte - behind : last_byte - behind]
        piece = MasterPiece(own_master, own, (rows, cols), record.dtype, *offsets[e])
        items.append(CastItem(matrix, piece, own_codes))
    return items


def _next_number(group: dist.ProcessGroup | None) -> int:
    if group is None:
        return 0
    _built[group] = _built.get(group, 0) + 1
    return _built[group]
