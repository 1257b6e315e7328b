"""What carries gradients to the ranks that own them, and weights to all ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from zerofp4.engine.flat import FlatBuffer
from zerofp4.ops import RankGradients

Gradients = Sequence[torch.Tensor | None]
"""p.grad of all trainable parameters, in their order."""


class Arrived(NamedTuple):
    """The gradients of a bucket, not averaged yet, for an update that averages them as it reads them.

    own: by parameter of the bucket, this rank's own gradient of what it owns, contiguous; None where it has
    none, or owns nothing.
    rows: the same of all ranks; None in a bucket of one rank, whose own gradient is the mean.
    """

    own: Sequence[torch.Tensor | None]
    rows: RankGradients | None


class Waitable(Protocol):
    """A gather of weights that has begun."""

    def wait(self) -> None:
        """What is queued next on the current stream finds the slices of all ranks."""


class Exchange(Protocol):
    """How gradients reach the ranks that own them. Methods are collective unless they say otherwise.

    A step calls begin(), then send_gradients() of each bucket and arrived() or average() of each, in the same
    order. While one bucket is updated, the gradients of the next travel: at most two buckets are between
    send_gradients() and arrived() or average(). What these two raise is an error of this rank alone, whose
    part of the exchange has taken place.
    """

    dtypes: Sequence[torch.dtype]
    """By bucket, what its gradients are sent as."""

    def begin(self) -> None:
        """A new exchange of all buckets begins."""

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """The gradients of bucket b are on their way to the ranks that own them. A gradient that is None
        counts as zeros; in place of all, None sends whatever lies there, for discard().
        """

    def can_add_in_update(self, b: int) -> bool:
        """Whether arrived() may be called for bucket b; else only average(). Not collective."""

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        """What is queued next on the current stream may read the gradients of bucket b, until the next but
        one bucket is sent.
        """

    def average(
        self,
        b: int,
        gradients: Gradients,
        squares: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        """Average bucket b in FP32, in rank order, into out, float32 [slice_numel]; None is the bucket's
        `gradients`.
        squares: int64 ops.SQUARES, to which those of the means are added.
        """

    def end(self) -> None:
        """Every rank has read the gradients of this exchange, which may be overwritten."""


class Transport(Exchange, Protocol):
    """An exchange of gradients that a step starts, and how weights reach all ranks."""

    buckets: Sequence[FlatBuffer]

    def is_local(self, b: int) -> bool:
        """Whether gradients of bucket b are their own means, read where they are. Not collective."""

    def check(self, b: int, gradients: Gradients, names: Sequence[str]) -> None:
        """Raise RuntimeError or TypeError for a gradient of bucket b that cannot be sent. Not collective."""

    def prepare(self, gradients: Gradients) -> Gradients:
        """Before the ranks agree: do what can fail on this rank alone. Not collective. Returns what the
        methods above are given.
        """

    def discard(self, b: int) -> None:
        """Take this rank's part in arrived() or average() of bucket b, of which nobody uses anything."""

    def open_weights(self) -> None:
        """Weights of all ranks may be overwritten from now on."""

    def halfway(self, b: int) -> tuple[int, int, Callable[[], None]] | None:
        """(position of a weight, its row, what to call): where the cast of bucket b may stop once, so that
        the codes before that row leave while the rest is cast. None where that gains nothing. Not collective.
        """

    def gather(self, b: int) -> Waitable | None:
        """This rank's slice of the weights of bucket b is on its way to all ranks; None in a bucket of one
        rank.
        """

    def nbytes_sent(self, b: int) -> int:
        """Bytes of gradients of bucket b that this rank sends in a step."""
