#pragma once
// Reinterpretation between float and its bits, and small integer helpers.

#include <cstring>

#include "common/macros.h"

namespace zerofp4 {

ZEROFP4_HD uint32_t to_bits(float x) {
#if ZEROFP4_DEVICE_CODE
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

ZEROFP4_HD float from_bits(uint32_t bits) {
#if ZEROFP4_DEVICE_CODE
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

constexpr float kInf = __builtin_huge_valf();
constexpr float kFloatMax = 3.40282346638528859812e+38f;

// Magnitudes are compared as integers: the bits of non-negative floats sort like the floats, and those of
// NaN, which a maximum of floats would drop, above those of infinity.
constexpr uint32_t kInfBits = 0x7f800000u;
ZEROFP4_HD uint32_t magnitude_bits(float x) { return to_bits(x) & 0x7fffffffu; }

ZEROFP4_HD float absolute(float x) {
#if ZEROFP4_DEVICE_CODE
    return fabsf(x);  // part of an instruction, which the bits are not
#else
    return from_bits(magnitude_bits(x));
#endif
}

// A maximum of magnitude bits as an amax: what is not finite counts as infinity.
ZEROFP4_HD float amax_of_bits(uint32_t bits) { return from_bits(bits < kInfBits ? bits : kInfBits); }

ZEROFP4_HD float fused_multiply_add(float a, float b, float c) {
#if ZEROFP4_DEVICE_CODE
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

ZEROFP4_HD uint32_t least_of_three(uint32_t a, uint32_t b, uint32_t c) {
#if ZEROFP4_DEVICE_CODE
    return __vimin3_u32(a, b, c);
#else
    const uint32_t least = a < b ? a : b;
    return least < c ? least : c;
#endif
}

ZEROFP4_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ZEROFP4_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace zerofp4
