"""NVFP4 and MXFP8 in plain PyTorch: the specification that every backend equals byte for byte, on any device.

All arithmetic is float32 in the order written, rounding to nearest even. The order is part of the format:
where a product has three factors the brackets say which two are multiplied first, because another order
changes bytes.
"""

from zerofp4.reference.adamw import adamw_step, average, power, root, square_sums
from zerofp4.reference.compact import (
    CompactMoments,
    code_values,
    compact_adamw_step,
    decode_moments,
    encode_moments,
    fma,
    join_master,
    master_bytes,
    no_moments,
    round_master,
    split_master,
)
from zerofp4.reference.elements import (
    e2m1_to_float,
    float_to_e2m1,
    float_to_e4m3,
    pack,
    transpose_packed,
    unpack,
)
from zerofp4.reference.experts import dequantize_experts, quantize_experts
from zerofp4.reference.four_over_six import block_error, four_over_six_scale, scale_candidates
from zerofp4.reference.gemm import gemm, gemm_alpha, mxfp8_operand, nvfp4_operand
from zerofp4.reference.hadamard import hadamard_transform
from zerofp4.reference.known import one_hot, pattern
from zerofp4.reference.layouts import compact_scale, expand_scale, swizzle_scale, unswizzle_scale
from zerofp4.reference.mxfp8 import (
    QuantizedMXFP8,
    dequantize_mxfp8,
    mxfp8_block_amax,
    mxfp8_decode,
    mxfp8_encode,
    mxfp8_scale,
    quantize_mxfp8,
    swizzle_mxfp8_scale,
)
from zerofp4.reference.quantize import Quantized, dequantize, quantize, tensor_amax
from zerofp4.reference.scales import (
    block_amax,
    block_encode,
    block_scale,
    blocks,
    divide,
    encode,
    encode_scale,
    magnitude,
    scaled,
    spread,
)
from zerofp4.reference.shards import partial_amax, partial_cast, place_shard
from zerofp4.reference.stochastic import (
    COLUMNWISE_STREAM,
    ROWWISE_STREAM,
    float_to_e2m1_stochastic,
    philox,
    random_bytes,
)

__all__ = [
    "COLUMNWISE_STREAM",
    "ROWWISE_STREAM",
    "CompactMoments",
    "Quantized",
    "QuantizedMXFP8",
    "adamw_step",
    "average",
    "block_amax",
    "block_encode",
    "block_error",
    "block_scale",
    "blocks",
    "code_values",
    "compact_adamw_step",
    "compact_scale",
    "decode_moments",
    "dequantize",
    "dequantize_experts",
    "dequantize_mxfp8",
    "divide",
    "e2m1_to_float",
    "encode",
    "encode_moments",
    "encode_scale",
    "expand_scale",
    "float_to_e2m1",
    "float_to_e2m1_stochastic",
    "float_to_e4m3",
    "fma",
    "four_over_six_scale",
    "gemm",
    "gemm_alpha",
    "hadamard_transform",
    "join_master",
    "magnitude",
    "master_bytes",
    "mxfp8_block_amax",
    "mxfp8_decode",
    "mxfp8_encode",
    "mxfp8_operand",
    "mxfp8_scale",
    "no_moments",
    "nvfp4_operand",
    "one_hot",
    "pack",
    "partial_amax",
    "partial_cast",
    "pattern",
    "philox",
    "place_shard",
    "power",
    "quantize",
    "quantize_experts",
    "quantize_mxfp8",
    "random_bytes",
    "root",
    "round_master",
    "scale_candidates",
    "scaled",
    "split_master",
    "spread",
    "square_sums",
    "swizzle_mxfp8_scale",
    "swizzle_scale",
    "tensor_amax",
    "transpose_packed",
    "unpack",
    "unswizzle_scale",
]
