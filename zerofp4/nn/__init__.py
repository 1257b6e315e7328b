"""Quantized layers: what a training loop does to its model."""

# ruff: noqa: F401 (what is not in __all__ is for the optimizer and integrations)
from zerofp4.nn.choice import ConversionReport, FilterFn, choose_weights, why_not_quantized
from zerofp4.nn.conv1d import Conv1D
from zerofp4.nn.convert import convert_model, converted_model_of, free_frozen
from zerofp4.nn.experts import Experts
from zerofp4.nn.grouped_linear import GroupedLinear
from zerofp4.nn.layer_norm import LayerNormLinear, LayerNormMLP
from zerofp4.nn.linear import Linear, quantize_input
from zerofp4.nn.plain_state import register_plain_state_dict
from zerofp4.nn.quantizers import primary_parameter, show_weights
from zerofp4.nn.recipe import MXFP8Recipe, NVFP4Recipe, autocast

__all__ = [
    "Conv1D",
    "ConversionReport",
    "Experts",
    "FilterFn",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Recipe",
    "NVFP4Recipe",
    "autocast",
    "convert_model",
    "quantize_input",
    "register_plain_state_dict",
]
