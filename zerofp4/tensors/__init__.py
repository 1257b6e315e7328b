"""Quantized tensors: autograd and torch over records, and the functions that make them."""

# ruff: noqa: F401
from zerofp4.tensors.arguments import reads_columns, weight_columns
from zerofp4.tensors.dispatch import HANDLERS
from zerofp4.tensors.gradient_places import GradientPlace
from zerofp4.tensors.grouped import GroupedNVFP4, host_sizes, quantize_grouped, sizes_on
from zerofp4.tensors.held import Holder, check_not_averaged, is_held
from zerofp4.tensors.initial_value import BEGINS_WITH_CODES, INIT_VAL, had_master, note_master
from zerofp4.tensors.lists import dequantize_many, swizzle_scales, unswizzle_scales
from zerofp4.tensors.mxfp8 import MXFP8Tensor, quantize_mxfp8
from zerofp4.tensors.nvfp4 import NVFP4Tensor, empty, quantize_dequantize
from zerofp4.tensors.products import multiply
from zerofp4.tensors.quantized_tensor import QuantizedTensor
from zerofp4.tensors.quantizer import Quantizer, StraightThrough, quantize
