"""Quantized layers: what a training loop does to its model."""

from zerofp4.nn.convert import ConversionReport, convert_model
from zerofp4.nn.linear import Linear
from zerofp4.nn.recipe import MXFP8Recipe, NVFP4Recipe, autocast

__all__ = [
    "ConversionReport",
    "Linear",
    "MXFP8Recipe",
    "NVFP4Recipe",
    "autocast",
    "convert_model",
]
