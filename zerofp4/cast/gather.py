"""all_gather_nvfp4 gathers packed codes of any shards; post_all_gather_processing completes weights."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import distributed
from zerofp4.cast.plan_cache import Kept, PlanCache
from zerofp4.cast.request import check_lists, check_shard, check_weights, weight_name
from zerofp4.cast.scales import gathered_buffers, gathered_shards
from zerofp4.cast.signature import check_same_weights, describe
from zerofp4.distributed import GroupReference, OwnError, PackedGather, attempt
from zerofp4.ops import GATHER_OTHER, GATHER_PRESENT, PostStage, target_of
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage


def all_gather_nvfp4(
    model_weights: Sequence[Any],
    start_offsets: Sequence[int | None],
    shard_numels: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give every rank the codes of all shards, in one all-gather of packed bytes.

    model_weights: as for the cast. With blocks of 1x16 their compact scales travel, too.
    start_offsets, shard_numels: this rank's part of each weight; None and 0 for nothing. The shards of the
        group cover every weight exactly once, at any offset.
    group: the process group of the shards.

    Examples:
        >>> weight = zerofp4.quantize(torch.randn(64, 64))
        >>> zerofp4.all_gather_nvfp4([weight], [0], [64 * 64])  # alone, a rank owns all

    A byte at an odd boundary is completed from both its owners. The first call with these weights and shards
    is a collective agreement and allocates staging; both are kept with the first weight.

    Raises TypeError or ValueError, the same on every rank, for invalid arguments, overlapping or missing
    shards. An error on one rank in a later call raises RuntimeError on the others, and none changes a weight.
    """
    group = distributed.resolve_group(group)
    cache = PlanCache("gather_plans", model_weights, group)
    kept, is_known = cache.find([], start_offsets, shard_numels)
    if is_known:
        kept.plan.run()
    else:
        parsed, error = attempt(_check_gather, model_weights, start_offsets, shard_numels)
        cache.keep(_gather_checked(kept, parsed, error, cache, group))
    cache.advance_versions()


def _gather_checked(
    kept: Kept | None, parsed, error: OwnError, cache: PlanCache, group: dist.ProcessGroup | None
) -> Kept:
    """Gather, with the old plan or a new one; returns it. parsed, error: of _check_gather()."""
    if kept is not None:
        fits = not error and parsed[1] == kept.shards
        if not error:  # else there may be no codes to gather
            kept.plan.bind_if_moved(gathered_buffers(kept.records))
        if kept.plan.run(GATHER_PRESENT if fits else GATHER_OTHER, error):
            return kept
        cache.drop()  # every rank came with other shards
    kept = _build_gather(parsed, error, group)
    kept.plan.run()
    return kept


def _check_gather(model_weights, start_offsets, shard_numels) -> tuple[list[NVFP4Storage], list[Shard]]:
    check_lists(model_weights=model_weights, start_offsets=start_offsets, shard_numels=shard_numels)
    if start_offsets is None or shard_numels is None:
        raise TypeError("start_offsets and shard_numels must be lists, got None")
    records = check_weights(model_weights)
    shards = []
    for i, (record, start, numel) in enumerate(zip(records, start_offsets, shard_numels, strict=True)):
        if isinstance(numel, bool) or not isinstance(numel, int):
            raise TypeError(f"shard_numels[{i}] must be an int, got {type(numel).__name__}")
        if numel < 0:
            raise ValueError(f"shard_numels[{i}] must not be negative, got {numel}")
        shards.append(check_shard(f"shard {i}", weight_name(i, record), record, start, numel))
    return records, shards


def _build_gather(parsed, error: OwnError, group: dist.ProcessGroup | None) -> Kept:
    if not error and parsed[0]:
        # Exchange whether this rank can run at all before any rank waits for it.
        _, error = attempt(target_of, parsed[0][0].device)
    records, shards = ([], []) if error else parsed
    gathered = distributed.exchange((describe(records), shards), error, group, "all_gather_nvfp4()")
    check_same_weights([weights for weights, _ in gathered])
    rank_shards = [of_rank for _, of_rank in gathered]
    names = [name for name, *_ in gathered[0][0]]
    distributed.check_ownership(names, [record.shape.numel() for record in records], rank_shards)
    device = records[0].device if records else torch.device("cpu")
    parts = [gathered_shards(records, of_rank) for of_rank in rank_shards]
    gather = PackedGather(gathered_buffers(records), parts, group, device)
    return Kept(gather, records, gather.group, shards)


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Complete weights whose codes were gathered: make their columnwise copies and padded scales.

    model_weights: distinct weights on one device. Columnwise data, if there is a buffer, is made from the
        codes. With blocks of 1x16, expanded and swizzled scales, if there are buffers, are made from the
        compact ones. (The cast writes all scales of 16x16 blocks.)

    Examples:
        >>> weight = zerofp4.quantize(torch.randn(64, 64), columnwise=True)
        >>> zerofp4.post_all_gather_processing([weight])

    Takes one launch for all columnwise data, and one for all scales. The weights' autograd versions advance.
    A CUDA graph that captures a call uses its buffers in every replay. The first weight keeps them alive.

    Raises TypeError or ValueError for anything but a list of distinct weights on one device that can be cast.
    """
    cache = PlanCache("post_plans", model_weights, None)
    kept, is_known = cache.find([])
    if not is_known:
        check_lists(model_weights=model_weights)
        records = check_weights(model_weights)
        if kept is None:
            device = records[0].device if records else torch.device("cpu")
            kept = Kept(PostStage(device), records, GroupReference(None))
        kept.plan.bind(records)
        cache.keep(kept)
    kept.plan.run()
    cache.advance_versions()
