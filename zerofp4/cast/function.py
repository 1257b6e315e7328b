"""cast_master_weights_to_nvfp4: a step of the CastPlan that belongs to the arguments of a call."""

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from zerofp4.cast.addresses import ShardAddresses
from zerofp4.cast.plan import CastPlan
from zerofp4.cast.plan_cache import (
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
from zerofp4.cast.status import PEER_MESSAGE
from zerofp4.distributed import attempt, resolve_group
from zerofp4.format import FLOAT32_MAX
from zerofp4.ops import ERROR_WORD, HASH_WORD
from zerofp4.tensors import NVFP4Tensor

_WANTS_ANOTHER = 1.0
"""In the error word: not an error (+inf), but a rank that wants another plan for the same weights."""


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
    fingerprint, _ = attempt(_fingerprint, *arguments)
    plans = attached(model_weights, "cast_plans")
    plan = find(plans, fingerprint, group)
    if plan is not None:
        plan.step_again(model_weights, itertools.chain(master_weights, fsdp_shard_model_weights or ()))
        keep(plans, plan)
        return
    request, error = attempt(check_request, *arguments)
    for plan in reversed(plans):
        if plan.group.refers_to(group) and same_weights(model_weights, plan.records):
            if plan.step_for(request, error, fingerprint):
                keep(plans, plan)
                return
            plans.remove(plan)
            break
    plan = _FunctionPlan(request, error, group)
    keep(plans, plan)
    plan.step_for(request, None, fingerprint)


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


class _FunctionPlan(CastPlan):
    """The plan of calls with the same weights, shards and options. Between calls it has the addresses of the
    last one's masters and shard buffers, and keeps them alive only for CUDA graphs.
    """

    fingerprint: list | None = None
    """Of the last call, where nothing is to be checked or taken anew if the next one has it too."""

    def __init__(self, request: CastRequest | None, error: Exception | None, group: dist.ProcessGroup | None):
        self._build(request, error, group)
        self._taken = self._present_addresses()

    def step_again(
        self, model_weights: Sequence[NVFP4Tensor], shard_tensors: Iterable[torch.Tensor | None]
    ) -> None:
        """A step with what the last call was given: masters and shard buffers, or others in their places."""
        late = self._status.take()
        self._run(None, shard_tensors)
        torch.autograd.graph.increment_version(model_weights)
        if late is not None:
            raise late

    def step_for(
        self, request: CastRequest | None, error: Exception | None, fingerprint: list | None
    ) -> bool:
        """A step with the masters, shard buffers and found_inf of a request, which it does not keep.

        An error is raised on this rank and keeps the others from writing. Returns False when all ranks want
        another plan, with other shards or options; where only some do, those raise ValueError.
        """
        if error is None and not self._fits(request):
            if self._all_want_another():
                return False
            raise ValueError(
                "start_offsets, lengths of master_weights, amax_groups or on_nonfinite are not those of the "
                "last call with these weights, and another rank's are: they change on all ranks or on none"
            )
        self.fingerprint = None
        try:
            if error is None:
                _, error = attempt(self._adopt, request)
            if error is not None:
                self._run(error)
            self.fingerprint = fingerprint
            self.step_again(request.weights, request.shard_tensors().values())
        finally:
            self._forget_tensors()
        return True

    def _hold(self, borrowed: Iterable[torch.Tensor | None]) -> None:
        super()._hold(borrowed)
        pin(self)

    def _fits(self, request: CastRequest) -> bool:
        mine = self._request
        return (
            request.shards == mine.shards
            and request.amax_groups == mine.amax_groups
            and request.on_nonfinite == mine.on_nonfinite
        )

    def _all_want_another(self) -> bool:
        """Join the reduction so that no rank writes, wanting another plan. Whether all ranks do."""
        self._stages.begin(error=True)
        self.reduced[ERROR_WORD] = _WANTS_ANOTHER
        # Below the hash of any rank that takes part or has an error.
        self.reduced[HASH_WORD] = -FLOAT32_MAX
        self._reduce()
        error_word, hash_word = self.reduced[[ERROR_WORD, HASH_WORD]].tolist()
        if error_word != _WANTS_ANOTHER:
            raise RuntimeError(PEER_MESSAGE)
        return hash_word == -FLOAT32_MAX

    def _adopt(self, request: CastRequest) -> None:
        """Take a request's addresses where they are not those of the last one."""
        self._request = request
        self.found_inf = self._own_found_inf if request.found_inf is None else request.found_inf
        present = self._present_addresses()
        if present != self._taken:
            self._take_addresses()
            self._taken = present

    def _present_addresses(self) -> list[tuple[int, torch.dtype]]:
        request = self._request
        codes = [record.rowwise_data for record in request.records]
        tensors = [*request.shard_tensors().values(), *codes, self.found_inf]
        return [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]

    def _forget_tensors(self) -> None:
        self._request.masters, self._request.shard_codes = [None] * len(self.records), None
        self._shards = ShardAddresses({})
