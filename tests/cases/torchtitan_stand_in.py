"""As much of torchtitan as zerofp4.integrations.torchtitan uses, for tests without the package."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

OURS = "zerofp4.integrations.torchtitan.optimizers"


class Container:
    """OptimizersContainer: an optimizer of each model part, by the name that all groups have."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list[Any] = field(default_factory=list)
        implementation: str = "fused"

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        (name,) = {group.optimizer_name for group in config.param_groups}
        build = self._resolve_optimizer_factory(name)
        self.optimizers = [build(part.parameters(), lr=0.02) for part in model_parts]

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> type:
        return {"AdamW": torch.optim.AdamW}[name]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)


def config_of(parallelize_fn: Callable | None = None, names: tuple[str, ...] = ("AdamW",)) -> Any:
    """A Trainer.Config. names: of the optimizers of its groups."""
    groups = [types.SimpleNamespace(optimizer_name=name) for name in names]
    return types.SimpleNamespace(
        training=types.SimpleNamespace(dtype="float32", disable_cuda_graphs=False),
        model_spec=types.SimpleNamespace(parallelize_fn=parallelize_fn or config_of),
        optimizer=Container.Config(param_groups=groups, implementation="foreach"),
    )


@contextlib.contextmanager
def torchtitan_stands_in() -> Iterator[type]:
    """Gives our NVFP4Optimizers over this file's Container."""
    names = ("", ".components", ".components.optimizer", ".models", ".models.llama3")
    names += (".models.llama3.config_registry",)
    modules = {f"torchtitan{name}": types.ModuleType(f"torchtitan{name}") for name in names}
    modules["torchtitan.components.optimizer"].OptimizersContainer = Container
    modules["torchtitan.models.llama3.config_registry"].llama3_8b = config_of
    sys.modules.update(modules)
    try:
        yield importlib.import_module(OURS).NVFP4Optimizers
    finally:
        for name in (*modules, OURS):
            sys.modules.pop(name, None)
