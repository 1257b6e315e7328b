"""Memory that nobody needs between two steps: which it is, and who has it meanwhile.

What a load reads lies beside the masters until all of it is found to be right. Gradients have memory that is
at least as large, and that holds nothing then.
"""

import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from zerofp4.engine import GradientReducer
from zerofp4.optim.read_chunks import ReadChunks
from zerofp4.optim.sharded import ShardedParameters


class Loan:
    """What the masters of one state dict are read into. lend: gives it, by parameter, when it is first asked
    for, and again where it has ended.

    ends: how often others may have written there by now. reads: of what is read, wherever it is read to.
    Copies are the same.
    """

    def __init__(self, lend: Callable[["Loan"], Sequence[torch.Tensor | None]]):
        self._lend, self._memory = lend, None
        self.ends, self.reads = 0, ReadChunks()

    def memory(self, i: int) -> torch.Tensor | None:
        """For the master of parameter i; None where there is none to lend."""
        if self._memory is None:
            self._memory = self._lend(self)
        return self._memory[i]

    def end(self) -> None:
        """The same state dict may be read into again, but what was read of it is lost."""
        self._memory = None
        self.ends += 1

    def __deepcopy__(self, memo: dict) -> "Loan":
        return self


class SpareMemory:
    """The memory of gradients, which one loan has at a time, until gradients or another loan need it.

    Free are the FP32 slices that gradients are reduced to, where there are such and clip_grad_norm_ has left
    nothing in them that a step is to use; else the memory in which gradients stay between a backward pass and
    a step, unless some p.grad lies there.
    """

    def __init__(self, shards: ShardedParameters, reducer: GradientReducer):
        self._shards, self._reducer = shards, reducer
        self._end: Callable[[], None] = lambda: None

    def lend(self, loan: Loan, is_reduced: bool) -> list[torch.Tensor | None]:
        """By parameter, memory like its master, or None. is_reduced: whether the slices are in use."""
        self.take_back()
        # Whoever lends holds no loan: it leads to the optimizer, which would be a circle.
        self._end = functools.partial(_end, weakref.ref(loan), loan.reads)
        found: list[torch.Tensor | None] = [None] * len(self._shards.masters)
        buffers = dict(enumerate(self._shards.buffers))
        free = {b: buf.gradients for b, buf in buffers.items() if buf.has_gradients and not is_reduced}
        free |= self._reducer.lend(buffers.keys() - free.keys(), self._end)
        for b, memory in free.items():
            for index, view in zip(buffers[b].indices, buffers[b].own_views(memory), strict=True):
                found[index] = view
        return found

    def take_back(self) -> None:
        """Gradients need it."""
        self._end()


def _end(loan: "weakref.ref[Loan]", reads: ReadChunks) -> None:
    reads.abandon()  # a load that failed may have left a chunk on its way, and nobody has its state dict
    found = loan()
    if found is not None:
        found.end()
