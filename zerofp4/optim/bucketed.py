"""A step in which each bucket is updated as soon as its gradients are here, while the next ones travel."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zerofp4.distributed import in_phase
from zerofp4.engine import GradientReducer, Peers
from zerofp4.ops import RankGradients
from zerofp4.optim.fused import FusedAdamW, Update
from zerofp4.optim.fused_checks import GRADIENT_DTYPES
from zerofp4.optim.inner import InnerOptimizers, holding, is_plain
from zerofp4.optim.sharded import ShardedParameters


class BucketedStep:
    """Steps of an optimizer of masters, bucket by bucket, where nobody can tell it from its step()."""

    def __init__(
        self,
        inners: InnerOptimizers,
        shards: ShardedParameters,
        reducer: GradientReducer,
        peers: Peers | None = None,
    ):
        self._inners, self._shards, self._reducer = inners, shards, reducer
        # A rank that did not come may have left gradients that are not what they should be.
        self._failed = None if peers is None else peers.failed
        self._left_out = None if peers is None else torch.zeros_like(peers.failed)
        self._added_up_in_update = frozenset(
            b
            for b in range(len(shards.buffers))
            if reducer.can_bring(b) and reducer.dtypes[b] in GRADIENT_DTYPES
        )

    def find_obstacle(self) -> str | None:
        """Why the masters are to be updated all at once; None where they are not."""
        other = next((one for one in self._inners.all if type(one) is not FusedAdamW), None)
        if other is not None:
            return f"{type(other).__name__} updates all masters at once, and FusedAdamW can in buckets"
        if any(buffer.is_of_whole_matrices for buffer in self._shards.buffers):
            return "whole matrices are updated all at once"
        return (
            None
            if is_plain(self._inners.all[0])
            else "step() of the optimizer of the masters has hooks, or is wrapped"
        )

    def prepare(
        self,
        gradients: Sequence[torch.Tensor | None] | None,
        present: Sequence[bool],
        factor: torch.Tensor | None,
        found: torch.Tensor | None,
    ) -> "PreparedStep":
        """What a step needs, before it is agreed on: all that may fail on one rank alone is done here.

        gradients: of the parameters; None where their means are in the FP32 slices. present: which parameters
        are expected to have one on any rank; what run() is told counts. factor: what means are multiplied by
        as they are read. found: float32 [] on the device, not 0 where the step is to be skipped; None where
        the host knows.
        """
        brought = frozenset() if gradients is None else self._added_up_in_update
        (inner,) = self._inners.all
        skip = self._failed if found is None else found if self._failed is None else self._left_out
        with holding(inner, clip_factor=factor, found_inf=skip):
            update = inner.start_update()
        for b, buffer in enumerate(self._shards.buffers):
            dtype = self._reducer.dtypes[b] if b in brought else torch.float32
            if b not in brought:
                self._shards.gradients_of(b)
            masters = [self._shards.masters[i] for i in buffer.indices if present[i]]
            update.expect(b, {master: dtype for master in masters if master is not None})
        if gradients is not None:
            gradients = in_phase("gradients", self._reducer.prepare)(gradients)
        return PreparedStep(update, gradients, brought, found)

    def run(
        self,
        prepared: "PreparedStep",
        present: Sequence[bool],
        publish: Callable[[Callable[[int], None]], None],
    ) -> None:
        """Reduce, update and publish.

        present: which parameters have a gradient on any rank. publish: publishes each bucket after the
        function that it is given has updated it.
        """
        update, gradients, brought, found = prepared
        if gradients is not None:
            in_phase("gradients", self._reducer.begin)(gradients, prepared=True)
        if found is not None and self._left_out is not None:
            torch.maximum(found, self._failed, out=self._left_out)

        def update_bucket(b: int) -> None:
            if b in brought:
                update(b, *self._bring(b, present))
                return
            if gradients is not None:
                in_phase("gradients", self._reducer.finish)(b)
            own = zip(self._shards.buffers[b].indices, self._shards.gradients_of(b), strict=True)
            update(b, {self._shards.masters[i]: g for i, g in own if g is not None and present[i]})

        try:
            publish(in_phase("update", update_bucket))
        finally:
            self._reducer.forget()

    def _bring(
        self, b: int, present: Sequence[bool]
    ) -> tuple[dict[torch.Tensor, torch.Tensor], RankGradients | None]:
        """By master, this rank's own gradients in bucket b, and those of all ranks, if there are others."""
        received, own, row = in_phase("gradients", self._reducer.bring)(b)
        gradients = {self._shards.masters[i]: g for i, g in own.items() if present[i]}
        if received is None:
            return gradients, None
        return gradients, RankGradients(received, self._shards.buffers[b].masters, row)


class PreparedStep(NamedTuple):
    """gradients: what the reducer is to begin with, None for nothing. brought: the buckets in which the
    update reads them, and adds up those of all ranks. found: as prepare() was given.
    """

    update: Update
    gradients: Sequence[torch.Tensor | None] | None
    brought: frozenset[int]
    found: torch.Tensor | None
