"""Programs of docs/trainers.md, and accelerate's FSDP2 on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from cases.docs import Ran


def with_fsdp2(accelerator: Any, plugin: Any) -> Any:
    """The accelerator, which shards with this plugin from now on, as all that the process makes later do.

    accelerate offers FSDP on GPUs alone; nothing that it calls needs one.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


@contextlib.contextmanager
def with_fsdp_on_cpus(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """An Accelerator that is given a plugin shards with it. Nothing that accelerate knew before counts, or
    afterwards.
    """
    import accelerate

    def init(self, *args, fsdp_plugin=None, init=accelerate.Accelerator.__init__, **options):
        if fsdp_plugin is None:
            return init(self, *args, **options)
        init(self, *args, cpu=True, **options)
        with_fsdp2(self, fsdp_plugin)

    patch.setattr(accelerate.Accelerator, "__init__", init)
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


# What must hold after a program of the page


def causal_loss(ran: Ran) -> float:
    """Of the model that a framework has trained: about 4.2 before."""
    batch = next(iter(ran.brought.loader))
    return ran.brought.causal_model(**batch).loss.item()


def has_trained_with_trainer(ran: Ran) -> None:
    assert causal_loss(ran) < 3.9 and (ran["folder"] / "checkpoint-10" / "optimizer.pt").exists()


def has_trained_with_accelerate(ran: Ran) -> None:
    assert causal_loss(ran) < 3.9 and (ran["folder"] / "optimizer.bin").exists()


def has_trained_with_lightning(ran: Ran) -> None:
    assert causal_loss(ran) < 3.9 and (ran["folder"] / "last.ckpt").exists()


def has_merged_adapters(ran: Ran) -> None:
    names = [name for name, _ in ran["merged"].named_parameters()]
    assert names and not any("lora" in name for name in names)
    assert (ran["folder"] / "adapter_model.safetensors").exists()


def has_trained_sharded(ran: Ran) -> None:
    assert isinstance(ran["sharded"], FSDPModule) and causal_loss(ran) < 3.9
    assert (ran["folder"] / "optimizer_0").exists()


CHECKS = [
    has_trained_with_trainer,
    has_trained_with_accelerate,
    has_trained_with_lightning,
    has_merged_adapters,
    has_trained_sharded,
]
"""Of the page's programs, in order, but for the last, which is torchtitan's."""

PACKAGES = ["transformers", "accelerate", "lightning", "peft", "safetensors"]
"""That the page needs."""
