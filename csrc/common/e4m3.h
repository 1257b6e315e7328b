#pragma once
// E4M3 (finite-only, as torch.float8_e4m3fn).

#include "common/bits.h"

namespace zerofp4 {

constexpr float kE4M3Max = 448.0f;

struct E4M3Magnitude {
    uint32_t byte;
    float value;
};

// Nearest even, saturating at 448, subnormals down to 2^-9. x is not negative; NaN saturates. What block
// scales are made with.
ZEROFP4_HD E4M3Magnitude round_to_e4m3(float x) {
    const float a = x < kE4M3Max ? x : kE4M3Max;
    // As in e2m1.h, with three mantissa bits: the addition rounds, 2^-6 is the smallest normal.
    const uint32_t exponent_bits = to_bits(a) & 0x7f800000u;
    const uint32_t e = exponent_bits > (121u << 23) ? exponent_bits : (121u << 23);
    const uint32_t m = e + (20u << 23);
    const float sum = a + from_bits(m);
    return {to_bits(sum) - m + (((e >> 23) - 121u) << 3), sum - from_bits(m)};
}

ZEROFP4_HD uint32_t magnitude_to_e4m3(float x) { return round_to_e4m3(x).byte; }

// The same of either sign; NaN gives 0x7f.
ZEROFP4_HD uint32_t float_to_e4m3(float x) {
    const uint32_t bits = to_bits(x);
    const uint32_t byte = magnitude_to_e4m3(from_bits(bits & 0x7fffffffu)) | (bits >> 24 & 0x80u);
    return x == x ? byte : 0x7fu;
}

// The magnitude of a byte that is not NaN.
ZEROFP4_HD float e4m3_to_float(uint32_t byte) {
#if ZEROFP4_DEVICE_CODE
    // In the places of a float's exponent and mantissa, where subnormals are subnormals too; a GPU multiplies
    // them as fast as others.
    return from_bits((byte & 0x7fu) << 20) * from_bits(247u << 23);  // times 2^120
#else
    const uint32_t magnitude = (byte & 0x7fu) << 20;
    const float subnormal = from_bits(magnitude + (121u << 23)) - 0.015625f;  // 2^-6
    const float normal = from_bits(magnitude + (120u << 23));
    return magnitude < (1u << 23) ? subnormal : normal;
#endif
}

// The same of a byte of either sign; NaN for 0x7f and 0xff.
ZEROFP4_HD float signed_e4m3_to_float(uint32_t byte) {
    const uint32_t bits = to_bits(e4m3_to_float(byte)) | (byte & 0x80u) << 24;
    return from_bits((byte & 0x7fu) == 0x7fu ? 0x7fc00000u : bits);
}

}  // namespace zerofp4
