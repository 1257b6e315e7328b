"""Adapters for other frameworks, one folder each. Nothing else in zerofp4 imports them."""

import importlib


def __getattr__(name: str):
    if name in ("fsdp2", "megatron", "torchtitan", "transformer_engine"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
