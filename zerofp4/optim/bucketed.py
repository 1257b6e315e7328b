"""A step in which each bucket is updated as soon as its gradients are here, while the next ones travel."""

from collections.abc import Callable, Sequence

import torch

from zerofp4.engine import GradientReducer
from zerofp4.ops import RankGradients
from zerofp4.optim.fused import FusedAdamW
from zerofp4.optim.fused_checks import GRADIENT_DTYPES
from zerofp4.optim.inner import give_gradients, is_plain
from zerofp4.optim.sharded import ShardedParameters


class BucketedStep:
    """Steps of an optimizer of masters, bucket by bucket, where nobody can tell it from its step()."""

    def __init__(self, inner: torch.optim.Optimizer, shards: ShardedParameters, reducer: GradientReducer):
        self._inner, self._shards, self._reducer = inner, shards, reducer
        self._added_up_in_update = frozenset(
            b
            for b in range(len(shards.buffers))
            if reducer.can_bring(b) and reducer.dtypes[b] in GRADIENT_DTYPES
        )

    def find_obstacle(self) -> str | None:
        """Why the masters are to be updated all at once; None where they are not."""
        if self._reducer.world_size == 1:
            return "in a world of one nothing travels"
        if type(self._inner) is not FusedAdamW:
            return f"{type(self._inner).__name__} updates all masters at once, and FusedAdamW can in buckets"
        return (
            None
            if is_plain(self._inner)
            else "step() of the optimizer of the masters has hooks, or is wrapped"
        )

    def run(
        self,
        gradients: Sequence[torch.Tensor | None] | None,
        present: Sequence[bool],
        publish: Callable[[Callable[[int], None]], None],
    ) -> None:
        """Reduce, update and publish.

        gradients: of the parameters; None where they have been reduced. present: which parameters have a
        gradient on any rank. publish: publishes each bucket after the function that it is given has updated
        it.
        """
        brought = frozenset() if gradients is None else self._added_up_in_update
        for b in range(len(self._shards.buffers)):
            if b not in brought:
                give_gradients(*self._shards.masters_and_gradients(b, present))
        update = self._inner.start_update(brought)
        if gradients is not None:
            self._reducer.begin(gradients, brought)

        def update_bucket(b: int) -> None:
            if b in brought:
                update.add_up(b, *self._bring(b, present))
                return
            if gradients is not None:
                self._reducer.finish(b)
            update(b)

        publish(update_bucket)

    def _bring(
        self, b: int, present: Sequence[bool]
    ) -> tuple[RankGradients, dict[torch.Tensor, torch.Tensor]]:
        """The gradients of bucket b on all ranks, and by master this rank's own."""
        received, own = self._reducer.bring(b)
        brought = RankGradients(received, self._shards.buffers[b].masters, self._reducer.rank)
        return brought, {self._shards.masters[i]: g for i, g in own.items() if present[i]}
