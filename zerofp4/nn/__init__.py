"""Quantized layers: what a training loop does to its model."""

from zerofp4.nn.convert import ConversionReport, convert_model
from zerofp4.nn.held import find_in_no_module, register_holder

__all__ = ["ConversionReport", "convert_model", "find_in_no_module", "register_holder"]
