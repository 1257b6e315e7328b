"""FusedAdamW as the update of a step: one bucket after the other."""

from collections.abc import Sequence

import torch

from zerofp4.engine import Arrived, Exchange, FlatBuffer
from zerofp4.optim.fused import FusedAdamW
from zerofp4.optim.fused_checks import GRADIENT_DTYPES
from zerofp4.optim.inner import holding


class BucketUpdate:
    """One step of FusedAdamW, whose part b is bucket b. Building it does everything that can fail on one
    rank.

    inner: the optimizer of the masters.
    buckets, masters: the masters, by trainable parameter.
    exchange: of gradients.
    present: by trainable parameter, whether it is expected to have a gradient on any rank; set it again once
    the ranks have agreed.
    in_slices: whether the means are in the buckets' `gradients`.
    factor, skip: float32 [] on the device, as FusedAdamW's clip_factor and found_inf.
    """

    def __init__(
        self,
        inner: FusedAdamW,
        buckets: Sequence[FlatBuffer],
        masters: Sequence[torch.Tensor | None],
        exchange: Exchange,
        *,
        present: Sequence[bool],
        in_slices: bool,
        factor: torch.Tensor | None,
        skip: torch.Tensor,
    ):
        self.present, self._buckets, self._masters = present, buckets, masters
        self._adds = [
            not in_slices and exchange.can_add_in_update(b) and dtype in GRADIENT_DTYPES
            for b, dtype in enumerate(exchange.dtypes)
        ]
        with holding(inner, clip_factor=factor, found_inf=skip):
            self._update = inner.start_update()
        for b, bucket in enumerate(buckets):
            dtype = exchange.dtypes[b] if self._adds[b] else torch.float32
            if not self._adds[b]:
                _ = bucket.gradient_views  # makes their memory
            own = [masters[i] for i in bucket.indices if present[i]]
            self._update.expect(b, {master: dtype for master in own if master is not None})

    def adds(self, b: int) -> bool:
        return self._adds[b]

    def __call__(self, b: int, arrived: Arrived | None) -> None:
        bucket = self._buckets[b]
        own = bucket.gradient_views if arrived is None else arrived.own
        gradients = {
            self._masters[i]: gradient
            for i, gradient in zip(bucket.indices, own, strict=True)
            if gradient is not None and self.present[i] and self._masters[i] is not None
        }
        self._update(b, gradients, None if arrived is None else arrived.rows)
