"""What ranks tell each other: collectives, and agreement on errors."""

# ruff: noqa: F401
from zerofp4.distributed.collectives import (
    PHASES,
    PREFIX,
    CollectiveError,
    GroupReference,
    OwnError,
    Pending,
    Stage,
    all_gather_slices,
    attempt,
    error_text,
    exchange,
    first_difference,
    in_phase,
    raised_by_all,
    rank_and_size,
    reduce_max,
    reduce_scatter_slices,
    resolve_group,
    start_exchange,
    start_gather,
    start_reduce_max,
    timeout_seconds,
)
from zerofp4.distributed.packed_gather import PackedGather, check_disjoint, check_ownership
