"""Transport: how gradients reach the ranks that own them, and how weights reach all ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from zerofp4.cast import StagedPlan
from zerofp4.engine.buckets import Wire
from zerofp4.engine.flat import FlatBuffer
from zerofp4.engine.gradient_memory import GradientMemory, Gradients
from zerofp4.ops import RankGradients


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


class Transport(Protocol):
    """Moves the gradients and weights of some buckets. A verb that an implementation leaves out does nothing.

    A step calls prepare() before the ranks agree, then begin(), then send_gradients() of each bucket and
    arrived() or average() of each, in the same order: at most two buckets are between both. A
    BackwardSchedule calls send_gradients() earlier. All verbs but prepare() and halfway() are collective, and
    what arrived() and average() raise is an error of this rank alone, whose part has taken place.
    """

    buckets: Sequence[FlatBuffer]
    wire: Wire
    dtypes: Sequence[torch.dtype]
    """By bucket, what its gradients are sent as."""
    memory: Sequence[GradientMemory | None]
    """By bucket, where this rank's own gradients are sent from; None in a bucket of one rank whose gradients
    are read in place, as the means.
    """
    sent_bytes: Sequence[int]
    """By bucket, what a rank sends of its gradients in a step, or other ranks read from its memory."""
    adds_in_update: Sequence[bool]
    """By bucket, whether arrived() may be called; else only average()."""

    def prepare(self, gradients: Gradients) -> Gradients:
        """Do what can fail on this rank alone. Returns what the verbs below are given."""

    # Gradients

    def begin(self) -> None:
        """A new exchange of all buckets begins."""

    def send_gradients(self, b: int, gradients: Gradients | None) -> None:
        """Begin to send the gradients of bucket b to the ranks that own them. A missing gradient counts as
        zeros. None in place of all sends whatever the memory holds, for discard().
        """

    def arrived(self, b: int, gradients: Gradients) -> Arrived:
        """What is queued next on the current stream may read the gradients of bucket b, until the next but
        one bucket is sent.
        """

    def average(self, b: int, gradients: Gradients, squares: torch.Tensor | None = None) -> None:
        """Average bucket b into the bucket's `gradients`, float32.

        squares: int64 ops.SQUARES, to which the squares of the means are added.
        """

    def discard(self, b: int) -> None:
        """Take this rank's part in arrived() or average() of bucket b, of which nobody uses anything."""

    def end(self) -> None:
        """Every rank has read the gradients of this exchange, which may be overwritten."""

    # Weights

    def open_weights(self) -> None:
        """Weights of all ranks may be overwritten from now on."""

    def halfway(self, b: int) -> tuple[int, int, Callable[[], None]] | None:
        """(position of a weight, its row, what to call): where the cast of bucket b may stop once, so that
        the codes before that row leave while the rest is cast. None where that gains nothing.
        """

    def gather(self, b: int) -> Waitable | None:
        """Begin to send this rank's slice of the weights of bucket b to all ranks; None if there is one."""


def check_gradients(transport: Transport, b: int, gradients: Gradients, names: Sequence[str]) -> None:
    """Raise TypeError for a gradient of bucket b that would lose values on its way without gradient_wire, and
    RuntimeError for one that aliases the memory of another parameter's gradient.
    """
    memory, dtype = transport.memory[b], transport.dtypes[b]
    if memory is not None:
        memory.check(gradients, names)
        dtype = memory.flat.dtype  # means of a host are sent as float32
    if transport.wire.dtype is not None or dtype == torch.float32:
        return
    for i in transport.buckets[b].indices:
        gradient = gradients[i]
        if gradient is not None and gradient.dtype != dtype:
            raise TypeError(
                f"{names[i]} has a gradient of {gradient.dtype}, which would be rounded to {dtype} to be "
                "added to those of other ranks: build the optimizer with gradient_wire=torch.float32, or "
                f"{dtype} if that is meant"
            )


HIGH_PRIORITY = (
    "NCCL's stream has the priority of the others, so that what travels waits until kernels that were queued "
    "before it have begun all of their blocks; zerofp4.launch.init_process_group makes a group with one "
    "of high priority, as pg_options=ProcessGroupNCCL.Options(is_high_priority_stream=True) does"
)


def describe_buckets(
    buckets: Sequence[FlatBuffer],
    plans: Sequence[StagedPlan | None],
    transport: Transport,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """buckets: what lies in each, and the bytes that this rank sends for it in a step. bytes_sent: those of
    all buckets by phase. advice: what would make a step faster, or None.
    """
    described = []
    for bucket, plan, dtype, sent in zip(buckets, plans, transport.dtypes, transport.sent_bytes, strict=True):
        size, amaxes = bucket.world_size, 0 if plan is None else plan.wire.nbytes
        described.append(
            {
                "kind": bucket.kind,
                "parameters": len(bucket.parameters),
                "ranks": size,
                "replicas": bucket.replica_count,
                "elements": sum(parameter.numel() for parameter in bucket.parameters),
                "whole_matrices": bucket.is_of_whole_matrices,
                "gradients_travel_as": str(dtype).removeprefix("torch."),
                "gradients": sent,
                # A ring sends every byte twice, but for the share of a rank.
                "amaxes": 2 * (size - 1) * amaxes // size,
                "weights": (size - 1) * bucket.weights.nbytes // size,
            }
        )
    options = None
    if group is not None and buckets[0].device.type == "cuda" and dist.get_world_size(group) > 1:
        options = getattr(group._get_backend(buckets[0].device), "options", None)
    phases = ("gradients", "amaxes", "weights")
    return {
        "buckets": described,
        "bytes_sent": {phase: sum(bucket[phase] for bucket in described) for phase in phases},
        "advice": None if getattr(options, "is_high_priority_stream", True) else HIGH_PRIORITY,
    }
