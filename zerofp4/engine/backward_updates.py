"""Updates inside the backward pass: which bucket has all of its gradients, and may go through a step."""

from collections.abc import Iterable, Sequence

import torch

from zerofp4.engine.buckets import Bucket, Gradients


class UpdateSchedule:
    """Counts gradients as a backward pass makes them, and says which buckets are complete.

    One rank alone takes a bucket as soon as it is complete. Several ranks take buckets in one order, each one
    when those before it are complete, too. step() takes the rest.

    [Note: when a weight may be written] autograd accumulates the gradient of a parameter once in a pass,
    behind every node that computes a part of it, and such a node has read the weight by then. So nothing of
    this pass reads the weight any more, with three exceptions. A node that saved the weight for another
    gradient alone (of `weight.detach()`) fails, since the update counts as a write in place. Reentrant
    checkpoints accumulate once for each segment: a weight that two segments use gets a second gradient, which
    note() refuses. A segment that is recomputed later and reads the weight without a gradient finds new
    values; nothing can tell. Other ranks write into a weight behind the agreement on its bucket, which this
    rank joins when its own gradients are complete.

    buckets: all of the same ranks. names: of all trainable parameters.
    """

    def __init__(self, buckets: Sequence[Bucket], names: Sequence[str]):
        self._buckets, self._names = buckets, names
        self._bucket_of = {i: b for b, bucket in enumerate(buckets) for i in bucket.indices}
        self._device = buckets[0].device
        self._in_order = buckets[0].world_size > 1
        self.lag = int(self._in_order)
        """How many buckets behind the one that is sent the next stage works: what is sent needs time."""
        self._stream: torch.cuda.Stream | None = None
        self.start_over()

    def start_over(self) -> None:
        """A step has ended."""
        self.has_begun = False
        """Whether a bucket has begun to go through the step."""
        self.has_updated = False
        """Whether masters of a bucket were updated."""
        self.waiting: dict[int, tuple[list[bool], torch.Tensor | None]] = {}
        """By bucket that was sent and not updated: of all parameters, which have a gradient in it, and the
        word of a NaN or Inf.
        """
        self._noted: set[int] = set()
        self._missing = [set(bucket.indices) for bucket in self._buckets]
        self._taken: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether a backward pass of this rank has made gradients since the last step(), or begun with a
        bucket. Another rank may have, and wait for this one.
        """
        return self.has_begun or bool(self._noted)

    def note(self, i: int) -> list[int]:
        """The gradient of parameter i is there. Returns the buckets to be taken now.

        Raises RuntimeError for a second gradient since the last step.
        """
        if i in self._noted:
            raise RuntimeError(
                f"{self._names[i]} got a second gradient before step(), and overlap='update' uses each "
                "gradient as soon as it is there: call step() after every backward pass, and give "
                "checkpoint() use_reentrant=False where several segments use one weight"
            )
        self._noted.add(i)
        b = self._bucket_of[i]
        self._missing[b].discard(i)
        if not self._in_order:
            return self._take([] if self._missing[b] else [b])
        end = len(self._taken)
        while end < len(self._buckets) and not self._missing[end]:
            end += 1
        return self._take(range(len(self._taken), end))

    def rest(self) -> list[int]:
        """The buckets that no backward pass has completed, to be taken in step()."""
        return self._take(b for b in range(len(self._buckets)) if b not in self._taken)

    def _take(self, buckets: Iterable[int]) -> list[int]:
        buckets = list(buckets)
        self._taken.update(buckets)
        return buckets

    def check_taken(self, gradients: Gradients) -> None:
        """Raise RuntimeError for a gradient of a bucket that was taken. gradients: of all parameters."""
        for i, gradient in enumerate(gradients):
            if gradient is not None and self._bucket_of[i] in self._taken:
                raise RuntimeError(
                    f"{self._names[i]} has a gradient that was assigned after its update in the backward pass"
                )

    def follow(self) -> None:
        """The current stream waits for what was queued here on another one. autograd runs each hook on the
        stream of its gradient, and lets the caller of backward() wait for these streams at the end.
        """
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
