#pragma once
// Two-level NVFP4 scales: one float per tensor and one E4M3 byte per block. The order of every operation is
// part of the format (see reference.py); sources are compiled without contraction into fused multiply-adds.

#include "common/e2m1.h"
#include "common/e4m3.h"

namespace zerofp4 {

ZEROFP4_HD float min_float(float a, float b) { return a < b ? a : b; }

// Maps the tensor's amax to the largest product of scale and code, 448 * 6.
ZEROFP4_HD float encode_scale(float amax) {
    if (amax == 0.0f || amax == kInf) return 1.0f;
    return min_float(2688.0f / amax, kFloatMax);
}

struct TensorScale {
    float block_factor;  // S_enc * (1/6), what a block's amax is multiplied with
    float decode;        // 1 / S_enc
};

ZEROFP4_HD TensorScale tensor_scale(float amax) {
    const float encode = encode_scale(amax);
    return {encode * (1.0f / 6.0f), 1.0f / encode};
}

// The stored scale byte of a block.
ZEROFP4_HD uint32_t block_scale(float block_amax, const TensorScale& tensor) {
    return float_to_e4m3(min_float(block_amax * tensor.block_factor, kFloatMax));
}

// What the elements of a block with this scale byte are multiplied with before rounding to E2M1.
ZEROFP4_HD float block_encode(uint32_t scale_byte, const TensorScale& tensor) {
    const float scale = e4m3_to_float(scale_byte);
    return scale > 0.0f ? min_float(1.0f / (scale * tensor.decode), kFloatMax) : kFloatMax;
}

// What the codes of a block are multiplied with to get values back.
ZEROFP4_HD float block_decode(uint32_t scale_byte, float amax) {
    return (e4m3_to_float(scale_byte) * amax) * (1.0f / 2688.0f);
}

}  // namespace zerofp4
