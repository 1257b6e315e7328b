"""Gathers that arrive as late as can be, and the ways to read a weight that they are on their way to."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zerofp4
from distributed.overlap_cases import SMALL, Net, make
from zerofp4 import NVFP4Tensor
from zerofp4.distributed import all_gather_slices
from zerofp4.engine import CollectiveTransport, PackedBuffer


class LateGather:
    """A gather of codes that takes long, on a GPU, and on the CPU does not begin before somebody waits for
    it: who reads without that finds codes of the step before. (Ranks must wait for them in one order.)
    """

    def __init__(self, buffer: PackedBuffer, begun: list[PackedBuffer]):
        self._buffer, self._begun = buffer, begun
        self._cast = torch.cuda.current_stream().record_event() if buffer.device.type == "cuda" else None

    def wait(self) -> None:
        self._begun.append(self._buffer)
        if self._cast is not None:
            self._cast.wait()
            torch.cuda._sleep(20_000_000)
        all_gather_slices(self._buffer.weights, self._buffer.group())


@contextlib.contextmanager
def late_gathers() -> Iterator[list[PackedBuffer]]:
    """Gathers of codes that begin in here are such; of which buffers somebody has waited for, in order."""
    begun: list[PackedBuffer] = []
    gather_now = CollectiveTransport.gather

    def gather(transport, b):
        bucket = transport.buckets[b]
        return LateGather(bucket, begun) if isinstance(bucket, PackedBuffer) else gather_now(transport, b)

    with mock.patch.object(CollectiveTransport, "gather", gather):
        yield begun


def make_pair(world, name="FusedAdamW", overlap="forward", **options):
    """Without overlap, and with it."""
    return [make(world, name, overlap=o, bucket_mb=SMALL, **options) for o in (None, overlap)]


def quantized(net: nn.Module) -> list[NVFP4Tensor]:
    return [p for p in net.parameters() if isinstance(p, NVFP4Tensor)]


def _each(read: Callable[[NVFP4Tensor], torch.Tensor]) -> Callable[[nn.Module], list[torch.Tensor]]:
    return lambda net: [read(weight) for weight in quantized(net)]


def _unpickled(weight: NVFP4Tensor) -> torch.Tensor:
    return pickle.loads(pickle.dumps(weight)).dequantize()


def _loaded(net: nn.Module) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    return [value.dequantize() for value in state.values() if isinstance(value, NVFP4Tensor)]


def _flattened(weight: NVFP4Tensor) -> torch.Tensor:
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    return NVFP4Tensor.__tensor_unflatten__(inner, context, weight.shape, weight.stride()).dequantize()


def _written(net: nn.Module) -> list[torch.Tensor]:
    """Into another model."""
    other = Net().to(net.norm.weight.device)
    zerofp4.convert_model(other)
    other.load_state_dict(net.state_dict())
    return [weight.dequantize() for weight in quantized(other)]


def _overwritten(weight: NVFP4Tensor) -> torch.Tensor:
    """What is written must not be overwritten by what arrives then."""
    with torch.no_grad():
        weight.copy_(torch.linspace(-1, 1, weight.numel(), device=weight.device).view(weight.shape))
    return weight.detach().clone().columnwise_data


def _input(weight: NVFP4Tensor, size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 16 * size, device=weight.device).view(16, size).bfloat16()


def _gradient(weight: NVFP4Tensor) -> torch.Tensor:
    x = _input(weight, weight.shape[1]).requires_grad_()
    F.linear(x, weight.detach()).float().square().sum().backward()
    return x.grad


def _product(weight: NVFP4Tensor) -> torch.Tensor:
    """Of the columns, as a backward pass makes it."""
    x = zerofp4.quantize(_input(weight, weight.shape[0]))
    return zerofp4.gemm(x, zerofp4.Operand(weight, "columnwise"))


def _recipe(weight: NVFP4Tensor) -> torch.Tensor:
    layer = zerofp4.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach())
    x = _input(weight, weight.shape[1]).requires_grad_()
    with zerofp4.nn.autocast(zerofp4.nn.NVFP4Recipe(stochastic_rounding=False)):
        layer(x).float().square().sum().backward()
    return x.grad


def _compiled(net: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(16, device=net.embedding.weight.device) % 32
    return [torch.compile(net, backend="aot_eager")(tokens).detach()]


def _plain(net: nn.Module) -> list[torch.Tensor]:
    zerofp4.plain_state_dict(net)
    return list(net.state_dict().values())


def _broadcast(net: nn.Module) -> list[torch.Tensor]:
    for weight in quantized(net):
        dist.broadcast(weight.detach(), 0)
    return [weight.columnwise_data for weight in quantized(net)]


READS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "rowwise_data": _each(lambda weight: weight.rowwise_data),
    "columnwise_data": _each(lambda weight: weight.columnwise_data),
    "dequantize": _each(lambda weight: weight.dequantize()),
    "float": _each(lambda weight: weight.float()),
    "clone": _each(lambda weight: weight.detach().clone().columnwise_data),
    "data": _each(lambda weight: weight.data.columnwise_data),
    "new Parameter": _each(lambda weight: nn.Parameter(weight).columnwise_data),
    "to": _each(lambda weight: weight.to("cpu", copy=True).columnwise_data),
    "pickle": _each(_unpickled),
    "torch.save": _loaded,
    "deepcopy": lambda net: [weight.columnwise_data for weight in quantized(copy.deepcopy(net))],
    "state_dict": lambda net: [
        value.columnwise_data for value in net.state_dict().values() if isinstance(value, NVFP4Tensor)
    ],
    "load_state_dict": _written,
    "copy_": _each(_overwritten),
    "plain_state_dict": _plain,
    "dequantize_many": lambda net: zerofp4.dequantize_many(quantized(net)),
    "backward": _each(_gradient),
    "gemm": _each(_product),
    "recipe": _each(_recipe),
    "tensor_flatten": _each(_flattened),
    "compiled": _compiled,
    "broadcast": _broadcast,
}
"""What a person does with a model: tensors that are what they should be where its weights are."""
