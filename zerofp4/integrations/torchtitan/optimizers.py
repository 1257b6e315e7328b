"""NVFP4Optimizers: torchtitan's optimizers, of a model whose weights are gathered in NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer

from zerofp4.integrations import fsdp2
from zerofp4.optim import FusedAdamW


class NVFP4Optimizers(OptimizersContainer):
    """The optimizers of a run, which cast the masters of its model after each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As OptimizersContainer.Config. A group's optimizer_name may be "FusedAdamW"."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return FusedAdamW if name == "FusedAdamW" else OptimizersContainer._resolve_optimizer_factory(name)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        super().__init__(config, model_parts=model_parts)
        # Nothing is prepared for a seed checkpoint, nor in a pipeline stage without linear layers.
        prepared = [part for part in model_parts if any(fsdp2.prepared_weights(part))]
        self.attachments = [fsdp2.attach(part, list(self)) for part in prepared]
