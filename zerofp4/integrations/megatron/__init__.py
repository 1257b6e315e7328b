"""Megatron-Core trains NVFP4 weights by its own distributed optimizer: docs/megatron.md."""

from zerofp4.integrations.megatron.convert import convert_model
from zerofp4.integrations.megatron.hook import install, uninstall

__all__ = ["convert_model", "install", "uninstall"]
