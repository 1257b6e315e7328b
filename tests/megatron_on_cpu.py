"""Lets Megatron-Core, which asks for CUDA and triton, run on a machine without a GPU, to try and to test it.

Everything of Megatron runs inside `with megatron_here():`, its first import included.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_STASH = "megatron.core.transformer.moe.paged_stash"
"""Imports triton, and does nothing unless it is asked to: who imports it gets functions that do nothing."""


@contextlib.contextmanager
def megatron_here() -> Iterator[None]:
    """Megatron can be imported and run: on the GPU, or else on the CPU.

    Its import replaces by what torch loads pickled tensors, and pickles name that. It is put back: ranks that
    get tensors would have to import Megatron first.
    """
    _supply_psutil()
    with (
        mock.patch.object(torch.storage, "_load_from_bytes", torch.storage._load_from_bytes),
        contextlib.nullcontext() if torch.cuda.is_available() else OnCpu(),
    ):
        yield


class _Idle(types.ModuleType):
    """A module, or a stream, each of whose functions does nothing."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _supply_psutil() -> None:
    """Checkpoints log by it how much memory their writing took."""
    if "psutil" in sys.modules or importlib.util.find_spec("psutil") is not None:
        return
    module = sys.modules["psutil"] = types.ModuleType("psutil")
    module.Process = lambda *_: types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))


class OnCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, whose types are called as Megatron expects them."""

    def __enter__(self):
        self._undo = contextlib.ExitStack()
        for patch in _patches():
            self._undo.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._undo.close()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _is_cuda(device) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _patches() -> Iterator[contextlib.AbstractContextManager]:
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU here: run Megatron on it")
    sys.modules.setdefault(_STASH, _Idle(_STASH))
    yield mock.patch.multiple(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda *_: _Idle("stream"),
        synchronize=lambda *_: None,
        get_rng_state=lambda *_: torch.get_rng_state(),
    )
    yield mock.patch.object(torch, "compile", lambda function=None, **_: function)  # or its imports take long
    import megatron.core.distributed.param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import random

    yield mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    yield mock.patch.multiple(
        buffers,
        _coalescing_manager=_one_after_another,
        dist_all_gather_func=_noted(dist.all_gather_into_tensor),
        dist_reduce_scatter_func=_noted(dist.reduce_scatter_tensor),
    )


_works: list[list] = []


@contextlib.contextmanager
def _one_after_another(group=None, device=None, async_ops=False) -> Iterator:
    """In place of torch's coalescing of collectives, which gloo does wrong where dtypes are mixed."""
    _works.append([])
    yield types.SimpleNamespace(wait=lambda works=_works[-1]: [work.wait() for work in works])
    _works.pop()


def _noted(collective):
    def run(*args, **kwargs):
        work = collective(*args, **kwargs)
        if work is not None:
            _works[-1].append(work)
        return work

    return run
