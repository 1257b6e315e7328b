"""CastPlan: casting sharded master weights to NVFP4, step after step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofp4 import distributed
from zerofp4.cast.request import check_request
from zerofp4.cast.staged import StagedPlan
from zerofp4.distributed import OwnError, attempt


class CastPlan:
    """Casts a list of sharded masters into a list of NVFP4 weights, any number of times.

    model_weights: NVFP4Tensors, or their records, the same list on every rank. One of shape [E, N, K] with
    block (16, 16) is E weights in all that follows, each with an amax, a group and skipping of its own; its
    shard is one of its E * N * K elements, and may begin and end inside any of them. Those with block (1, 16)
    have no columnwise copy.
    master_weights[i]: the 1D float32 or bfloat16 elements of weight i that this rank owns, start_offsets[i]
    the flat index of the first one; None and None where it owns nothing. Any offset and length will do, also
    inside a tile or a byte; no element may be owned twice. An element that no rank owns keeps its code and
    does not count for the amax. Of a weight with four over six a shard has whole blocks, or whole rows of
    tiles. bfloat16 masters give the bytes of the same values in float32.

    group: process group that the masters are sharded over; None is the default group, or a world of one where
    torch.distributed is not initialized (RuntimeError where a launcher started several ranks).
    fsdp_shard_model_weights[i]: 1D uint8 of (start + n + 1) // 2 - start // 2 bytes that the codes go to
    instead of the weight's rowwise_data; scales and amax still go to the weight.
    amax_groups: lists of weights that share one amax (each keeps a copy of it); of weights [E, N, K], all
    with the same E, the experts with the same index do.
    on_nonfinite: "skip" leaves the weights of an amax group with a NaN or Inf master as they were, on every
    rank, and sets found_inf; "raise" does so too, then synchronizes and raises FloatingPointError naming the
    weights.
    found_inf: float32 [1] on the weights' device, set to 1 when something was skipped and never cleared; the
    plan has one of its own (`plan.found_inf`) if none is given.

    A CUDA graph that step(), all_gather() or post() is captured in uses, in every replay, the storage of the
    capture: codes, masters, shard buffers and found_inf. The plan keeps that alive, also after refresh(),
    and must itself live as long as the graph. After refresh() capture again: a replay does not see the new
    storage.

    Building is collective: every rank must build the same plan, and an invalid argument on any rank
    raises the same ValueError or TypeError on all of them. Who raises what, and what is left to the
    process group's timeout, stands in docs/failures.md.
    """

    def __init__(
        self,
        model_weights: Sequence[Any],
        master_weights: Sequence[torch.Tensor | None],
        start_offsets: Sequence[int | None],
        group: dist.ProcessGroup | None = None,
        *,
        fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
        amax_groups: Sequence[Sequence[Any]] | None = None,
        on_nonfinite: str = "skip",
        found_inf: torch.Tensor | None = None,
    ):
        group = distributed.resolve_group(group)
        options = (fsdp_shard_model_weights, amax_groups, on_nonfinite, found_inf)
        request, error = attempt(check_request, model_weights, master_weights, start_offsets, *options)
        # For the engine, which queues other work between the stages of a step, and for FusedAdamW.
        self.staged = StagedPlan(request, error, group)

    def __repr__(self) -> str:
        return f"CastPlan({self.staged.summary()})"

    @property
    def found_inf(self) -> torch.Tensor:
        """float32 [1], 1 once a step has skipped something."""
        return self.staged.found_inf

    def step(self) -> None:
        """Amax (unless an update left it), one MAX all-reduce, scales, codes. Every rank of the group must
        call it. The weights are complete, and their autograd versions advance, in post().

        On a GPU it takes the host the same time for any number of weights, only queues work on the current
        stream, allocates nothing and can be captured in a CUDA graph, which then does in each replay what the
        captured step did, with or without its own amaxes.

        Storage that has moved is noticed before anything is read or written: on the CPU all of it, on a GPU
        weights that were rebound. A `.data` assigned to a master is noticed there in check() and post(),
        and in a step that is being captured; until then a step uses the storage that the plan knows and
        keeps alive.

        Where this rank cannot take part (storage moved: RuntimeError) it still joins the reduction, flagged,
        so that no rank writes; the others raise RuntimeError as soon as they hear of it: on the CPU in
        this call, on a GPU in check() or in a later step(), which then has done its own work.
        """
        self.staged.run(OwnError(self.staged.find_moved(every=False))).raise_if_any()

    def all_gather(self) -> None:
        """Give every rank the codes of all shards. Collective; only queues work on a GPU.

        Storage that has moved is noticed as in step(). Where that or a step that did not take place keeps one
        rank from giving its codes, no rank changes a weight: that rank raises RuntimeError, the others do as
        soon as they hear of it, as with step().

        Raises ValueError if an element is owned by no rank, or if codes went to fsdp_shard_model_weights,
        which are the caller's to gather.
        """
        self.staged.all_gather()

    def post(self) -> None:
        """Columnwise data of every weight that has some, from its rowwise data, in one launch; with it the
        weights are complete. Only queues work on a GPU.

        The weights' autograd versions advance: as after any update in place, a backward pass through the old
        values fails. (Not in the replay of a CUDA graph.) Raises RuntimeError if any weight, master or shard
        buffer has moved; what other ranks found wrong is raised by check() or a later step().
        """
        OwnError(self.staged.find_moved()).raise_if_any()
        self.staged.complete()

    def check(self) -> None:
        """Wait for the last step or gather and raise RuntimeError if a rank kept all from writing, or if any
        weight, master or shard buffer has moved since the plan took its address.

        Does not wait while a CUDA graph is being captured, nor for the replay of one, which leaves no mark to
        wait for: synchronize with the replay first, then its errors are raised here.
        """
        self.staged.check()

    def refresh(self, master_weights: Sequence[torch.Tensor | None] | None = None) -> None:
        """Take the addresses of weights, masters and shard buffers anew, after any of them moved. Amaxes left
        by an update are taken back. Not collective; only queues work on the current stream. CUDA graphs that
        were captured before keep using the old addresses: capture again.

        master_weights: tensors of the same lengths that have taken the places of the masters.

        Raises TypeError or ValueError for what the plan could not have been built with, or when a weight has
        another shape, dtype or device than it was built for, or a master another length.
        """
        self.staged.refresh(master_weights)
