#pragma once
// E4M3 (finite-only, as torch.float8_e4m3fn).

#include "common/bits.h"

namespace zerofp4 {

constexpr float kE4M3Max = 448.0f;

// Nearest even, saturating at 448, subnormals down to 2^-9. x is not negative; NaN saturates. What block
// scales are made with.
ZEROFP4_HD uint32_t magnitude_to_e4m3(float x) {
    const float a = x < kE4M3Max ? x : kE4M3Max;
    // As in e2m1.h, with three mantissa bits: the addition rounds, 2^-6 is the smallest normal.
    const uint32_t exponent_bits = to_bits(a) & 0x7f800000u;
    const uint32_t e = exponent_bits > (121u << 23) ? exponent_bits : (121u << 23);
    const uint32_t m = e + (20u << 23);
    return to_bits(a + from_bits(m)) - m + (((e >> 23) - 121u) << 3);
}

// The same of either sign; NaN gives 0x7f.
ZEROFP4_HD uint32_t float_to_e4m3(float x) {
    const uint32_t bits = to_bits(x);
    const uint32_t byte = magnitude_to_e4m3(from_bits(bits & 0x7fffffffu)) | (bits >> 24 & 0x80u);
    return x == x ? byte : 0x7fu;
}

ZEROFP4_HD float e4m3_to_float(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u;
    const uint32_t mantissa = byte & 7u;
    const float subnormal = static_cast<float>(static_cast<int32_t>(mantissa)) * 0.001953125f;  // 2^-9
    const float normal = from_bits((exponent + 120u) << 23 | mantissa << 20);
    return exponent == 0u ? subnormal : normal;
}

}  // namespace zerofp4
