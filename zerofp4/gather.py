"""Gathering packed codes from arbitrary shards, and what has to be done once they are there."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofp4 import collectives
from zerofp4.ops import TransposeStage
from zerofp4.request import (
    PLANS_PER_WEIGHT,
    attached,
    attempt,
    check_agreement,
    check_lengths,
    check_shard,
    check_weights,
    same_records,
    weight_name,
)
from zerofp4.shard import Shard
from zerofp4.storage import NVFP4Storage
from zerofp4.tensor import NVFP4Tensor


def all_gather_nvfp4(
    model_weights: Sequence[NVFP4Tensor],
    start_offsets: Sequence[int | None],
    shard_numels: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give every rank the codes of all shards of all weights, in one all-gather of packed bytes.

    Rank-local start_offsets[i] and shard_numels[i] say what this rank owns of weight i (None and 0 for
    nothing); the shards of the group must cover every weight exactly once, at any offset. A byte at an odd
    boundary is completed from both its owners. The first call with these weights and shards is a collective
    agreement and allocates staging; both are kept with the first weight.

    Raises TypeError or ValueError, the same on every rank, for invalid arguments, overlapping or missing
    shards. An error on one rank in a later call raises RuntimeError on the others, and none changes a weight.
    """
    group = collectives.resolve_group(group)
    plans = attached(model_weights, "gather_plans")
    parsed, error = attempt(_check_gather, model_weights, start_offsets, shard_numels)
    for records, shards, gather in reversed(plans):
        if not (gather.group.refers_to(group) and same_records(model_weights, records)):
            continue
        if error is not None:
            gather.run(error=error)
        if parsed[1] == shards:
            buffers = [record.rowwise_data for record in records]
            if [buffer.data_ptr() for buffer in buffers] != gather.pointers:
                gather.bind(buffers)
            gather.run()
            return
    gather = _build_gather(parsed, error, group)
    plans.append((*parsed, gather))
    del plans[:-PLANS_PER_WEIGHT]
    gather.run()


def _check_gather(model_weights, start_offsets, shard_numels) -> tuple[list[NVFP4Storage], list[Shard]]:
    check_lengths(len(model_weights), start_offsets=start_offsets, shard_numels=shard_numels)
    records = check_weights(model_weights)
    shards = []
    for i, (record, start, numel) in enumerate(zip(records, start_offsets, shard_numels, strict=True)):
        if isinstance(numel, bool) or not isinstance(numel, int) or numel < 0:
            raise ValueError(f"shard_numels[{i}] must be an int of at least 0, got {numel!r}")
        shards.append(check_shard(f"shard_numels[{i}]", weight_name(i, record), record, start, numel))
    return records, shards


def _build_gather(parsed, error: Exception | None, group) -> collectives.PackedGather:
    records, shards = parsed if error is None else ([], [])
    weights = [(tuple(record.shape), str(record.dtype)) for record in records]
    payload = (weights, [], "", [tuple(shard) for shard in shards])
    signatures = collectives.exchange(payload, error, group)
    names = [weight_name(i, record) for i, record in enumerate(records)]
    check_agreement(signatures, names)
    rank_shards = [[Shard(*shard) for shard in signature[-1]] for signature in signatures]
    collectives.check_ownership(names, [record.shape.numel() for record in records], rank_shards)
    buffers = [record.rowwise_data for record in records]
    device = records[0].device if records else torch.device("cpu")
    return collectives.PackedGather(buffers, rank_shards, group, device)


def post_all_gather_processing(model_weights: Sequence[NVFP4Tensor]) -> None:
    """Columnwise data of every weight that has a columnwise buffer, from its gathered codes. One launch.

    The columnwise scales are there already: the cast writes both sides.
    """
    records = [r for r in check_weights(model_weights) if r.columnwise_data is not None]
    TransposeStage([(record.rowwise_data, record.columnwise_data) for record in records]).run()
