"""Quantized layers: what a training loop does to its model."""

from zerofp4.nn.convert import ConversionReport, convert_model

__all__ = ["ConversionReport", "convert_model"]
