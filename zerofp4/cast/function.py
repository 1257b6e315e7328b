"""cast_master_weights_to_nvfp4: a step of the CastPlan that belongs to the arguments of a call."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4.cast.plan_cache import (
    advance_versions,
    attached,
    find,
    integers_fingerprint,
    keep,
    pin,
    same_weights,
    tensors_fingerprint,
    weights_fingerprint,
)
from zerofp4.cast.request import CastRequest, check_request
from zerofp4.cast.staged import StagedPlan
from zerofp4.distributed import GroupReference, OwnError, attempt, resolve_group
from zerofp4.ops import Addresses, pointers
from zerofp4.storage import NVFP4Storage


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
    """Cast sharded masters into NVFP4 weights: one step of the CastPlan that belongs to these arguments.

    See CastPlan for the arguments; masters are 1D, float32 or bfloat16. The plan is built, collectively, when
    no earlier call had these weights, shards and options; it is kept with the first weight. Masters and
    buffers may have moved since: then this rank takes their addresses, without a collective (but not while a
    CUDA graph is captured: RuntimeError). A call with the same tensors in the same places as the last one is
    not checked again, only compared with it. The masters are not kept, except of a call that is captured in a
    CUDA graph: what the graph uses in every replay lives as long as the first weight.

    Afterwards call all_gather_nvfp4 (or gather the shard buffers), then post_all_gather_processing. An
    argument that is invalid on one rank only raises there, and on the other ranks in the same way as CastPlan
    and CastPlan.step say; a rank that calls with other weights than its peers is found out by the process
    group's timeout only.

    Raises ValueError for manual_post_all_gather_processing=False: the columnwise copy is never made behind
    the caller's back, call post_all_gather_processing.
    """
    group = resolve_group(group)
    arguments = (
        model_weights,
        master_weights,
        start_offsets,
        fsdp_shard_model_weights,
        amax_groups,
        on_nonfinite,
        found_inf,
        manual_post_all_gather_processing,
    )
    fingerprint = attempt(_fingerprint, *arguments)[0]
    kept = attached(model_weights, "cast_plans")
    found = find(kept, fingerprint, group)
    if found is None:
        request, error = attempt(check_request, *arguments)
        found = _find_for(request, error, model_weights, kept, group)
        found.take(request)
        found.fingerprint = fingerprint
    keep(kept, found)
    found.step(model_weights, itertools.chain(master_weights, fsdp_shard_model_weights or ()))


@dataclasses.dataclass(eq=False)
class _KeptPlan:
    """A plan that calls with the same weights, shards and options use. Between calls it has the addresses of
    the last one's masters and shard buffers, and keeps them alive only for CUDA graphs.
    """

    plan: StagedPlan
    taken: tuple[bytes | list[int], list[torch.dtype]] | None
    """Addresses and dtypes of the tensors of the last call; None where the plan failed to take them."""
    fingerprint: list | None = None
    """Of the last call, where nothing is to be checked or taken anew if the next one has it too."""

    @property
    def group(self) -> GroupReference:
        return self.plan.group

    @property
    def addresses(self) -> Addresses:
        return self.plan.addresses

    @property
    def records(self) -> list[NVFP4Storage]:
        return self.plan.records

    def take(self, request: CastRequest) -> None:
        """Make the tensors of a request that fits those of the next step. An error is every rank's."""
        present = _places(request)
        if present != self.taken:
            self.fingerprint = self.taken = None  # until the addresses are those of a call
            _, error = attempt(self.plan.adopt, request)
            if error:
                self.plan.run(error)
            self.taken = present
        self.plan.let_go()

    def step(self, model_weights: Sequence[Any], borrowed: Iterable[torch.Tensor | None]) -> None:
        late = self.plan.run(OwnError(), borrowed)
        if self.plan.held_for_graphs:
            pin(self)
        advance_versions(model_weights)
        late.raise_if_any()


def _find_for(
    request: CastRequest | None,
    error: OwnError,
    model_weights: Sequence[Any],
    kept: list[_KeptPlan],
    group: dist.ProcessGroup | None,
) -> _KeptPlan:
    """The plan of these weights that a checked request fits, else a new one, where all ranks come with a
    request that fits none.

    Raises the error on this rank and, because it joins the step of the others, RuntimeError on them.
    """
    for candidate in reversed(kept):
        if candidate.group.refers_to(group) and same_weights(model_weights, candidate.records):
            if error:
                candidate.plan.run(error)
            if candidate.plan.fits(request):
                return candidate
            if not candidate.plan.decline():
                raise ValueError(
                    "start_offsets, lengths of master_weights, amax_groups or on_nonfinite are not those of "
                    "the last call with these weights, and another rank's are: they change on all ranks or "
                    "on none"
                )
            kept.remove(candidate)
            break
    return _KeptPlan(StagedPlan(request, error, group), _places(request))


def _places(request: CastRequest) -> tuple[bytes, list[torch.dtype]]:
    buffers = [buffer for record in request.records for _, buffer in record.buffers()]
    tensors = [*request.shard_tensors().values(), *buffers]
    return pointers(tensors), [tensor.dtype for tensor in tensors]


def _fingerprint(
    model_weights, master_weights, start_offsets, shard_codes, amax_groups, on_nonfinite, found_inf, manual
) -> list | None:
    """What check_request and the addresses of a plan depend on; None for arguments that must be checked."""
    if manual is not True or type(on_nonfinite) is not str:
        return None
    parts = [
        weights_fingerprint(model_weights),
        tensors_fingerprint(master_weights),
        integers_fingerprint(start_offsets),
        () if shard_codes is None else tensors_fingerprint(shard_codes),
        () if amax_groups is None else _groups_fingerprint(amax_groups),
        () if found_inf is None else tensors_fingerprint([found_inf]),
        on_nonfinite,
    ]
    return None if None in parts else parts


def _groups_fingerprint(amax_groups) -> list | None:
    if type(amax_groups) not in (list, tuple) or not {list, tuple}.issuperset(map(type, amax_groups)):
        return None
    members = weights_fingerprint(list(itertools.chain.from_iterable(amax_groups)))
    return None if members is None else [members, list(map(len, amax_groups))]
