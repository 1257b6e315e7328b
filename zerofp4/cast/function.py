"""cast_master_weights_to_nvfp4: a step of the CastPlan that belongs to the arguments of a call."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.cast.plan import CastPlan
from zerofp4.cast.plan_cache import Kept, PlanCache
from zerofp4.cast.request import CastRequest, check_request
from zerofp4.distributed import OwnError, attempt, resolve_group
from zerofp4.storage import weight_record


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    amax_groups: Sequence[Sequence[Any]] | None = None,
    on_nonfinite: str = "skip",
    found_inf: torch.Tensor | None = None,
) -> None:
    """Cast sharded master weights into NVFP4 weights: one step of the CastPlan for these arguments.

    The arguments are those of CastPlan. manual_post_all_gather_processing must be True (else ValueError),
    since only post_all_gather_processing makes columnwise copies.

    Examples:
        >>> weight = zerofp4.empty((64, 64))
        >>> master = torch.randn(64 * 64)
        >>> zerofp4.cast_master_weights_to_nvfp4([weight], [master], [0])
        >>> zerofp4.all_gather_nvfp4([weight], [0], [64 * 64])
        >>> zerofp4.post_all_gather_processing([weight])

    The first call with these weights, shards and options builds the plan, which is collective, and keeps it
    with the first weight. Later calls find it, and take new addresses of masters and buffers without a
    collective (RuntimeError while a CUDA graph is captured). Masters are kept alive only if a CUDA graph
    captured the call. Errors are those of CastPlan and CastPlan.step (docs/failures.md).
    """
    group = resolve_group(group)
    cache = PlanCache("cast_plans", model_weights, group)
    members = attempt(_members, amax_groups)[0]
    tensors = [master_weights, fsdp_shard_model_weights or (), () if found_inf is None else [found_inf]]
    options = (members, start_offsets, on_nonfinite, manual_post_all_gather_processing)
    kept, is_known = cache.find(tensors, *options)
    if not is_known:
        shards = (master_weights, start_offsets, fsdp_shard_model_weights)
        options = (amax_groups, on_nonfinite, found_inf, manual_post_all_gather_processing)
        request, error = attempt(check_request, model_weights, *shards, *options)
        kept = _fitting(kept, request, error, cache, group)
        kept.plan.let_go()
        cache.keep(kept)
    late = kept.plan.run(OwnError(), itertools.chain(master_weights, fsdp_shard_model_weights or ()))
    cache.advance_versions()
    late.raise_if_any()


def _members(amax_groups: Sequence[Sequence[Any]] | None) -> list[list[int]]:
    """Lists of ids of records, which the plan keeps alive."""
    return [[id(weight_record(weight)) for weight in members] for members in amax_groups or ()]


def _fitting(
    kept: Kept | None,
    request: CastRequest | None,
    error: OwnError,
    cache: PlanCache,
    group: dist.ProcessGroup | None,
) -> Kept:
    """The cached plan, if the checked request fits it, with the request's tensors; else a new one, if all
    ranks need one. Raises the error here, and RuntimeError on the others, whose step it joins.
    """
    if kept is not None:
        if error:
            kept.plan.run(error)
        if kept.plan.fits(request):
            kept.fingerprint = None  # until the addresses are those of a call
            _, error = attempt(kept.plan.adopt, request)
            if error:
                kept.plan.run(error)
            return kept
        if not kept.plan.decline():
            raise ValueError(
                "start_offsets, lengths of master_weights, amax_groups or on_nonfinite are not those of the "
                "last call with these weights, and another rank's are: they change on all ranks or on none"
            )
        cache.drop(captured=kept.plan.held_for_graphs)
    plan = CastPlan.of(request, error, group)
    return Kept(plan, plan.records, plan.group)
