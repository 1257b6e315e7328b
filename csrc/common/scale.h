#pragma once
// Two-level NVFP4 scales: one float per tensor and one E4M3 byte per block. The order of every operation is
// part of the format (see zerofp4/reference); sources are compiled without contraction into fused
// multiply-adds.

#include "common/e2m1.h"
#include "common/e4m3.h"

namespace zerofp4 {

ZEROFP4_HD float min_float(float a, float b) { return a < b ? a : b; }

// Maps the tensor's amax to the largest product of scale and code: 448 * 6, or 256 * 6 under four over six
// with that maximum. 1 for what is not the amax of numbers: 0, inf, and given ones that are negative or NaN.
ZEROFP4_HD float encode_scale(float amax, float e4m3_max = kE4M3Max) {
    if (!(amax > 0.0f && amax < kInf)) return 1.0f;
    return min_float(e4m3_max * kE2M1Max / amax, kFloatMax);
}

struct TensorScale {
    float encode;        // S_enc
    float decode;        // 1 / S_enc
    float block_factor;  // S_enc * (1/6), what a block's amax is multiplied with
};

ZEROFP4_HD TensorScale tensor_scale(float amax, float e4m3_max = kE4M3Max) {
    const float encode = encode_scale(amax, e4m3_max);
    return {encode, 1.0f / encode, encode * (1.0f / 6.0f)};
}

// The stored scale of a block, and its value.
ZEROFP4_HD E4M3Magnitude rounded_scale(float block_amax, const TensorScale& tensor) {
    return round_to_e4m3(block_amax * tensor.block_factor);  // saturates, so that no product is too large
}

ZEROFP4_HD uint32_t block_scale(float block_amax, const TensorScale& tensor) {
    return rounded_scale(block_amax, tensor).byte;
}

// What the elements of a block whose scale has this value are multiplied with before rounding to E2M1.
ZEROFP4_HD float encode_of(float scale, const TensorScale& tensor) {
    return scale > 0.0f ? min_float(1.0f / (scale * tensor.decode), kFloatMax) : kFloatMax;
}

ZEROFP4_HD float block_encode(uint32_t scale_byte, const TensorScale& tensor) {
    return encode_of(e4m3_to_float(scale_byte), tensor);
}

// What the codes of a block are multiplied with to get values back; the tensor's part of it first.
ZEROFP4_HD constexpr float decode_factor(float e4m3_max) { return 1.0f / (kE2M1Max * e4m3_max); }

ZEROFP4_HD float block_decode_by(uint32_t scale_byte, float amax, float factor) {
    return (e4m3_to_float(scale_byte) * amax) * factor;
}

ZEROFP4_HD float block_decode(uint32_t scale_byte, float amax, float e4m3_max = kE4M3Max) {
    return block_decode_by(scale_byte, amax, decode_factor(e4m3_max));
}

}  // namespace zerofp4
