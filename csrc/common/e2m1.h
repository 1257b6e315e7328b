#pragma once
// E2M1 codes (4 bits): 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign in bit 3.

#include "common/bits.h"

namespace zerofp4 {

constexpr float kE2M1Max = 6.0f;

// Nearest code, ties to the even one, saturating at 6; NaN gives code 7 without its sign.
//
// Adding m = 2^(e + 22), with e the exponent of |x| (at least that of 1), leaves exactly one mantissa bit of
// |x| in the sum, rounded to nearest even by the addition itself. What lies above m's bits is then the code
// within its binade; the exponent supplies the rest. Branch-free, so that compilers vectorize it.
ZEROFP4_HD uint32_t float_to_e2m1(float x) {
    const uint32_t bits = to_bits(x);
    const float magnitude = from_bits(bits & 0x7fffffffu);
    const float a = magnitude < kE2M1Max ? magnitude : kE2M1Max;  // false for NaN too: code 7
    const uint32_t exponent_bits = to_bits(a) & 0x7f800000u;
    const uint32_t e = exponent_bits > 0x3f800000u ? exponent_bits : 0x3f800000u;
    const uint32_t m = e + (22u << 23);
    const uint32_t code = to_bits(a + from_bits(m)) - m + ((e >> 22) - 254u);
    const uint32_t sign = magnitude == magnitude ? (bits >> 28) & 8u : 0u;
    return code | sign;
}

// The code of a magnitude below 7, as the bits of the float 2^23 + kBias + code. Between the values 0, 2, 4
// and 6 codes grow by 2, 1 and 1/2 per unit, so that the code is the least of three lines; at 2^23 a float
// has no bits after the point, and each sum rounds its line to the nearest integer, ties to the even one.
constexpr uint32_t kBiasedZero = 0x4b000000u;  // 2^23

template <uint32_t kBias = 0>
ZEROFP4_HD uint32_t biased_code(float magnitude) {
    constexpr float kInteger = 8388608.0f + kBias;
    return least_of_three(to_bits(fused_multiply_add(magnitude, 2.0f, kInteger)),
                          to_bits(magnitude + (kInteger + 2.0f)),
                          to_bits(fused_multiply_add(magnitude, 0.5f, kInteger + 4.0f)));
}

// Value of a code, exact in float: the codes 2..7 are floats with a one-bit mantissa, 0 and 1 are 0 and one
// half.
ZEROFP4_HD float e2m1_to_float(uint32_t code) {
    const uint32_t magnitude = code & 7u;
    const uint32_t normal = ((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22;
    const uint32_t bits = magnitude >= 2u ? normal : magnitude * 0x3f000000u;
    return from_bits(bits | (code & 8u) << 28);
}

}  // namespace zerofp4
