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
        self._added_up_in_update = [
            b
            for b in range(len(shards.buffers))
            if reducer.can_bring(b) and reducer.dtypes[b] in GRADIENT_DTYPES
        ]

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
        reduced: Sequence[torch.Tensor | None],
        publish: Callable[[Callable[[int], None]], None],
    ) -> None:
        """Reduce, update and publish.

        gradients: of the parameters; None where they have been reduced. reduced: this rank's pieces of where
        they are reduced to, None for a parameter that has a gradient on no rank. publish: publishes each
        bucket after the function that it is given has updated it.
        """
        give_gradients(self._shards.masters, reduced)
        update = self._inner.start_update()
        if gradients is not None:
            self._reducer.begin(gradients, self._added_up_in_update)

        def update_bucket(b: int) -> None:
            if gradients is None:
                update(b)
            elif b in self._added_up_in_update:
                update.add_up(b, *self._bring(b))
            else:
                self._reducer.finish(b)
                update(b)

        publish(update_bucket)

    def _bring(self, b: int) -> tuple[RankGradients, dict[torch.Tensor, torch.Tensor]]:
        """The gradients of bucket b on all ranks, and by master this rank's own."""
        received, own = self._reducer.bring(b)
        brought = RankGradients(received, self._shards.buffers[b].masters, self._reducer.rank)
        return brought, {self._shards.masters[i]: gradient for i, gradient in own.items()}
