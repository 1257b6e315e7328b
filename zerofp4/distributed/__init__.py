"""What ranks tell each other: collectives, and agreement on errors."""

from zerofp4.distributed.agreement import (
    OwnError,
    attempt,
    error_text,
    exchange,
    first_difference,
    raised_by_all,
)
from zerofp4.distributed.collectives import (
    GroupReference,
    all_gather_slices,
    rank_and_size,
    reduce_max,
    resolve_group,
    start_exchange,
    start_reduce_max,
    timeout_seconds,
)
from zerofp4.distributed.ownership import check_disjoint, check_ownership
from zerofp4.distributed.packed_gather import PackedGather
from zerofp4.distributed.phases import PHASES, PREFIX, in_phase
from zerofp4.distributed.stage import CollectiveError, Pending, Stage

__all__ = [
    "PHASES",
    "PREFIX",
    "CollectiveError",
    "GroupReference",
    "OwnError",
    "PackedGather",
    "Pending",
    "Stage",
    "all_gather_slices",
    "attempt",
    "check_disjoint",
    "check_ownership",
    "error_text",
    "exchange",
    "first_difference",
    "in_phase",
    "raised_by_all",
    "rank_and_size",
    "reduce_max",
    "resolve_group",
    "start_exchange",
    "start_reduce_max",
    "timeout_seconds",
]
