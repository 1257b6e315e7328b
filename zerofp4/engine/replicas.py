"""Means over replicas: ranks that own the same slices of the same parameters."""

import torch

from zerofp4 import ops
from zerofp4.distributed import start_exchange
from zerofp4.engine.flat import FlatBuffer

STAGE = "averaging gradients over replicas"


class ReplicaMean:
    """Takes what the ranks of each replica have averaged to the mean of these means, in replica order: so the
    order of addition of 2 x 2 ranks is ((g0 + g1) / 2 + (g2 + g3) / 2) / 2, in FP32.

    A slice has a part for each replica, which averages it and gives it to the others.
    """

    def __init__(self, buffers: list[FlatBuffer], device: torch.device):
        needed = [b.replica_count * (b.part.stop - b.part.start) for b in buffers if b.replica_count > 1]
        self._received = torch.empty(max(needed, default=0), dtype=torch.float32, device=device)

    def take(self, buffer: FlatBuffer, squares: torch.Tensor | None) -> None:
        """Collective over the replicas: the gradients of a buffer become the mean. squares: those of this
        rank's part are added to it, as ops.average does.
        """
        if not buffer.slice_numel:
            return
        group, count = buffer.replicas(), buffer.replica_count
        parts = [buffer.gradients[part] for part in buffer.parts]
        own = parts[buffer.replica]
        received = self._received[: count * own.numel()].view(count, own.numel())
        sent = [[part] if part.numel() else [] for part in parts]
        arrivals = [[row] if own.numel() else [] for row in received]
        for work in start_exchange(arrivals, sent, group, STAGE):
            work.wait()
        if own.numel():
            received[buffer.replica].copy_(own)
            ops.average(received, own, None, 0, squares)
        sent = [[own] if own.numel() else []] * count
        arrivals = [[part] if part.numel() else [] for part in parts]
        for work in start_exchange(arrivals, sent, group, STAGE):
            work.wait()
