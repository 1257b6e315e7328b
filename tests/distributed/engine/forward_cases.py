"""Gathers that arrive as late as can be, and the ways to read a model that they are on their way to."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from cases.optim import through_a_file
from torch import nn

import zerofp4
from distributed.engine.overlap_cases import SMALL, Net, make
from zerofp4 import NVFP4Tensor
from zerofp4.distributed import all_gather_slices
from zerofp4.engine import Bucket, CollectiveTransport


class LateGather:
    """A gather of codes that takes long, on a GPU, and on the CPU does not begin before somebody waits for
    it: who reads without that finds codes of the step before. (Ranks must wait for them in one order.)
    """

    def __init__(self, buffer: Bucket, begun: list[Bucket]):
        self._buffer, self._begun = buffer, begun
        self._cast = torch.cuda.current_stream().record_event() if buffer.device.type == "cuda" else None

    def wait(self) -> None:
        self._begun.append(self._buffer)
        if self._cast is not None:
            self._cast.wait()
            torch.cuda._sleep(20_000_000)
        for flat in self._buffer.gathered:
            all_gather_slices(flat, self._buffer.group())


@contextlib.contextmanager
def late_gathers() -> Iterator[list[Bucket]]:
    """Gathers of codes that begin in here are such; of which buffers somebody has waited for, in order."""
    begun: list[Bucket] = []
    gather_now = CollectiveTransport.gather

    def gather(transport, b):
        bucket = transport.buckets[b]
        return LateGather(bucket, begun) if bucket.is_packed else gather_now(transport, b)

    with mock.patch.object(CollectiveTransport, "gather", gather):
        yield begun


def make_pair(world, name="FusedAdamW", overlap="forward", **options):
    """Without overlap, and with it."""
    return [make(world, name, overlap=o, bucket_mb=SMALL, **options) for o in (None, overlap)]


def quantized(net: nn.Module) -> list[NVFP4Tensor]:
    return [p for p in net.parameters() if isinstance(p, NVFP4Tensor)]


def _codes(weights) -> list[torch.Tensor]:
    return [weight.columnwise_data for weight in weights]


def _loaded(net: nn.Module) -> list[torch.Tensor]:
    values = through_a_file(net.state_dict()).values()
    return [value.dequantize() for value in values if isinstance(value, NVFP4Tensor)]


def _written(net: nn.Module) -> list[torch.Tensor]:
    """Into another model."""
    other = Net().to(net.norm.weight.device)
    zerofp4.convert_model(other, columnwise=True)
    other.load_state_dict(net.state_dict())
    return [weight.dequantize() for weight in quantized(other)]


def _compiled(net: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(16, device=net.embedding.weight.device) % 32
    return [torch.compile(net, backend="aot_eager")(tokens).detach()]


def _plain(net: nn.Module) -> list[torch.Tensor]:
    zerofp4.plain_state_dict(net)
    return list(net.state_dict().values())


def _broadcast(net: nn.Module) -> list[torch.Tensor]:
    for weight in quantized(net):
        dist.broadcast(weight.detach(), 0)
    return _codes(quantized(net))


READS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "torch.save": _loaded,
    "deepcopy": lambda net: _codes(quantized(copy.deepcopy(net))),
    "state_dict": lambda net: _codes(v for v in net.state_dict().values() if isinstance(v, NVFP4Tensor)),
    "load_state_dict": _written,
    "plain_state_dict": _plain,
    "compiled": _compiled,
    "broadcast": _broadcast,
}
"""What a person does with a model: tensors that are what they should be where its weights are. (What one does
with a weight is in READS of engine/test_late_gather.py.)
"""
