"""Updates inside the backward pass: which bucket has all of its gradients, and may go through a step."""

from collections.abc import Callable, Iterable, Sequence

import torch

from zerofp4.distributed import OwnError
from zerofp4.engine.buckets import Bucket, Gradients


class UpdateSchedule:
    """Counts gradients as a backward pass makes them, and says which buckets are complete.

    One rank alone takes a bucket as soon as it is complete, and step() takes the rest. Several ranks take
    buckets in one order, each one when those before it are complete, too. They take the rest at the end of a
    backward pass, since other ranks may have had all gradients, and wait.

    [Note: when a weight may be written] autograd accumulates the gradient of a parameter once in a pass,
    behind every node that computes a part of it, and such a node has read the weight by then. So nothing of
    this pass reads the weight any more, with three exceptions. A node that saved the weight for another
    gradient alone (of `weight.detach()`) fails, since the update counts as a write in place. Reentrant
    checkpoints accumulate once for each segment: a weight that two segments use gets a second gradient, which
    note() refuses. A segment that is recomputed later and reads the weight without a gradient finds new
    values; nothing can tell. Other ranks write into a weight behind the agreement on its bucket, which this
    rank joins when its own gradients are complete, or its pass has ended.

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
        self.is_refused = False
        """Whether no bucket does, since every rank raises an error of the last step in this one."""
        self.has_updated = False
        """Whether masters of a bucket were updated, as far as this rank knows."""
        self.error = OwnError()
        """What this rank has found that keeps it from an update. step() raises it; until then the agreement
        on every bucket hears of it, and buckets are cast from masters that no rank updates.
        """
        self.waiting: dict[int, tuple[dict[int, bool], torch.Tensor | None]] = {}
        """By bucket that was sent and not updated: which of its parameters have a gradient, and the word of a
        NaN or Inf.
        """
        self._pass: int | None = None
        """The last backward pass that has made a gradient."""
        self._is_over = False
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

        Raises RuntimeError for a second gradient since the last step, or one of a second backward pass whose
        bucket went with the first.
        """
        b = self._bucket_of[i]
        if i in self._noted or b in self._taken:
            which = "a second gradient" if i in self._noted else "a gradient in a second backward pass"
            raise RuntimeError(
                f"{self._names[i]} got {which} before step(), and overlap='update' uses each "
                "gradient as soon as it is there: call step() after every backward pass, and give "
                "checkpoint() use_reentrant=False where several segments use one weight"
            )
        self._noted.add(i)
        self._missing[b].discard(i)
        if not self._in_order:
            return self._take([] if self._missing[b] else [b])
        end = len(self._taken)
        while end < len(self._buckets) and not self._missing[end]:
            end += 1
        return self._take(range(len(self._taken), end))

    def rest(self) -> list[int]:
        """The turns that are left: of the buckets that have not been taken, and of the stages behind the last
        one. There are none when it is asked again.
        """
        if self._is_over:
            return []
        self._is_over, count = True, len(self._buckets)
        rest = self._take(b for b in range(count) if b not in self._taken)
        return [*rest, *range(count, count + 3 * self.lag)]

    def at_end_of_pass(self, call: Callable[[], None]) -> None:
        """In a backward pass of several ranks: call this at its end, once. A pass that broke off calls
        nothing; nor does one inside of another (of a segment that a reentrant checkpoint recomputes), behind
        which there may be more gradients.
        """
        running = torch._C._current_graph_task_id()
        if not self._in_order or self._pass == running:
            return
        self._pass = running

        def end() -> None:
            if torch._C._current_autograd_node() is None:
                call()

        torch.autograd.Variable._execution_engine.queue_callback(end)

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
