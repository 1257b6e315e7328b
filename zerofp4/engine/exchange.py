"""How one bucket travels: its gradients to their owners, its weights to every rank."""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from zerofp4 import ops
from zerofp4.distributed import OwnError, Pending
from zerofp4.engine.buckets import Bucket, GradientMemory, in_order, is_sendable
from zerofp4.format import WEIGHT_DTYPES
from zerofp4.ops import RankGradients
from zerofp4.storage import is_freed

Waitable = Pending | torch.cuda.Event
"""A transfer that has begun. wait() makes the current stream, or without a GPU the host, wait for it."""


class Abstain(enum.Enum):
    ABSTAIN = 0


ABSTAIN = Abstain.ABSTAIN
"""Instead of gradients: this rank joins collectives without data, to keep them paired."""

BucketGradients = Sequence[torch.Tensor | None]
"""p.grad of the parameters of a bucket, in their order; None counts as zeros."""


class Arrived(NamedTuple):
    """The gradients of a bucket, for an update.

    own: by parameter of the bucket, this rank's gradient of its shard, contiguous; None without a gradient,
        or if it owns nothing.
    rows: the same of all ranks, which the update averages as it reads; None if `own` is the mean.
    """

    own: BucketGradients
    rows: RankGradients | None


UPDATE_DTYPES = (torch.float32, torch.bfloat16)
"""Gradients that an update can average as it reads them."""


class BucketExchange(Protocol):
    """Moves one bucket: its gradients to their owners, its weights to every rank.

    In a step: send(), then receive() or average(), with at most one other bucket sent in between; then the
    cast, and gather(). A scheduler may send() earlier. All are collective. An error that receive() or
    average() raises is of this rank alone, which has joined their collectives by then.

    memory: this rank's gradients are sent from it; None if kernels read them in place.
    arrives_as: the dtype of the gradients that receive() returns; None if it returns none.
    received: where gradients of other ranks wait for it; None if they are read on those ranks, or there are
        none. Buckets may share the memory.
    present: by parameter of the bucket, whether the last send() had a gradient of it; None if the device
        decides which parameters are updated.
    halfway: (position of a weight, its row, function to call): the cast may pause there once, so that the
        codes before that row leave while the rest is cast; None if that gains nothing.
    error: of this rank in the last send(), which receive() and average() raise.
    """

    bucket: Bucket
    memory: GradientMemory | None
    arrives_as: torch.dtype | None
    received: torch.Tensor | None
    present: Sequence[bool] | None
    halfway: tuple[int, int, Callable[[], None]] | None
    error: OwnError

    def send(self, gradients: BucketGradients | Abstain) -> None:
        """Begin to send gradients to the ranks that own them."""

    def receive(self) -> Arrived | None:
        """The gradients of all ranks, which may be read until the bucket after the next is sent; None if the
        mean is in `bucket.gradients`.
        """

    def average(self, squares: torch.Tensor | None = None) -> None:
        """Write the mean into `bucket.gradients`, float32.

        squares: int64 ops.SQUARES, to which the squares of the means are added.
        """

    def finish(self) -> None:
        """Instead of receive(): finish the exchange and ignore the data."""

    def gather(self) -> Waitable | None:
        """Begin to send this rank's slice of the weights to all ranks. None in a bucket of one rank."""


class LocalExchange(BucketExchange):
    """A bucket of one rank, whose gradient is the mean: read in place, or rounded into `memory`."""

    received = halfway = None

    def __init__(self, bucket: Bucket, memory: GradientMemory | None):
        self.bucket, self.memory = bucket, memory
        is_in_place = memory is None and bucket.keeps_gradients and bucket.sent_as in UPDATE_DTYPES
        self.arrives_as = bucket.sent_as if is_in_place else None
        self.error = OwnError()
        self.present: Sequence[bool] = ()
        self._gradients: BucketGradients = ()
        self._means: GradientMemory | None = None

    def in_place(self, gradients: BucketGradients) -> BucketGradients:
        """Gradients as kernels read them: themselves, or contiguous copies."""
        return [g if g is None else in_order(g, self.arrives_as or _own_dtype(g)) for g in gradients]

    def send(self, gradients: BucketGradients | Abstain) -> None:
        """Without memory, take the gradients that in_place() returned."""
        if gradients is ABSTAIN:
            self._gradients = ()
            return
        self.present = [gradient is not None for gradient in gradients]
        if self.memory is None:
            self._gradients = gradients
        else:
            self.memory.take(gradients)

    def receive(self) -> Arrived | None:
        if self.arrives_as is None:
            self.average()
            return None
        gradients, self._gradients = self._gradients, ()  # to be freed after the update
        return Arrived(gradients, None)

    def average(self, squares: torch.Tensor | None = None) -> None:
        bucket = self.bucket
        squares = squares if bucket.is_counted else None
        if self.memory is not None:
            ops.average(self.memory.flat, bucket.gradients, self.memory.flat[0], 0, squares)
            return
        if self._means is None:
            self._means = GradientMemory(bucket, bucket.gradients.view(1, -1))
        self._means.take(self._gradients)
        if squares is not None:
            ops.add_squares([bucket.gradients], squares)

    def finish(self) -> None:
        self._gradients = ()

    def gather(self) -> None:
        return None


def in_place(
    exchanges: Sequence[BucketExchange], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Gradients of all trainable parameters for send(): contiguous if kernels read them in place."""
    found = list(gradients)
    for exchange in exchanges:
        if isinstance(exchange, LocalExchange) and exchange.memory is None:
            indices = exchange.bucket.indices
            for i, gradient in zip(indices, exchange.in_place([found[i] for i in indices]), strict=True):
                found[i] = gradient
    return found


def _own_dtype(gradient: torch.Tensor) -> torch.dtype:
    return gradient.dtype if gradient.dtype in WEIGHT_DTYPES else torch.float32


def are_as_sent(exchanges: Sequence[BucketExchange], gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether each gradient, of all parameters, is contiguous and of the dtype in which it is sent, one of
    WEIGHT_DTYPES.
    """
    return {e.bucket.sent_as for e in exchanges} <= set(WEIGHT_DTYPES) and all(
        gradients[i] is None or is_sendable(gradients[i], exchange.bucket.sent_as)
        for exchange in exchanges
        for i in exchange.bucket.indices
    )


def check_gradients(
    exchange: BucketExchange, gradients: BucketGradients, names: Sequence[str], are_known: bool = False
) -> None:
    """Raise RuntimeError for a gradient that is sparse, elsewhere, freed, of another shape, or in the memory
    of another parameter's gradient; TypeError for one that would lose values on its way without
    gradient_wire.

    names: of the bucket's parameters. are_known: whether gradients of the same kinds have passed before.
    """
    bucket = exchange.bucket
    for name, gradient, shape in () if are_known else zip(names, gradients, bucket.shapes, strict=True):
        if gradient is not None:
            _check_gradient(name, gradient, shape, bucket)
    if exchange.memory is not None:
        exchange.memory.check(gradients, names)


def as_sent(exchange: BucketExchange, gradients: BucketGradients, names: Sequence[str]) -> BucketGradients:
    """check_gradients(), and the gradients as send() takes them."""
    check_gradients(exchange, gradients, names)
    return exchange.in_place(gradients) if isinstance(exchange, LocalExchange) else gradients


def _check_gradient(name: str, gradient: torch.Tensor, shape: torch.Size, bucket: Bucket) -> None:
    problem, dtype = None, bucket.sent_as
    if gradient.layout != torch.strided:
        problem = f"of layout {gradient.layout}: gradients must be dense"
    elif gradient.device != bucket.device:
        problem = f"on {gradient.device}, and its master is on {bucket.device}"
    elif is_freed(gradient) and not gradient._is_zerotensor():
        problem = "whose storage was freed in place (resize_)"
    elif gradient.shape != shape:
        problem = f"of shape {tuple(gradient.shape)}, and has shape {tuple(shape)}"
    if problem is not None:
        raise RuntimeError(f"{name} has a gradient {problem}")
    if bucket.wire is None and dtype != torch.float32 and gradient.dtype != dtype:
        raise TypeError(
            f"{name} has a gradient of {gradient.dtype}, which would be rounded to {dtype} to be added to "
            f"those of other ranks: build the optimizer with gradient_wire=torch.float32, or {dtype} if that "
            "is meant"
        )
