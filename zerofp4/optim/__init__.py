"""Optimizers for models with NVFP4 weights."""

from zerofp4.optim.zero import ZeroFP4Optimizer

__all__ = ["ZeroFP4Optimizer"]
