#pragma once
// Rounding at random for other hosts, beside E2M1's in stochastic.h, and block scales that saturate nothing.

#include "common/scale.h"
#include "common/stochastic.h"

namespace zerofp4 {

// Up for as many of the 65,536 numbers r as the lower 16 bits count. A finite value stays finite.
ZEROFP4_HD uint16_t float_to_bfloat16_stochastic(float x, uint32_t r) {
    constexpr uint32_t kInfinity = 0x7f800000u, kLargest = 0x7f7fffffu, kNaN = 0x7fc0u;
    const uint32_t bits = to_bits(x), size = bits & 0x7fffffffu;
    const uint32_t sum = size + r < kLargest ? size + r : kLargest;
    const uint32_t rounded = ((size < kInfinity ? sum : kInfinity) | (bits & 0x80000000u)) >> 16;
    return static_cast<uint16_t>(size > kInfinity ? kNaN : rounded);
}

// A random byte r adds (r + 1/2) / 256 of a step, then the sum is rounded down, at most 448. NaN gives 0x7f.
ZEROFP4_HD uint32_t float_to_e4m3_stochastic(float y, uint32_t r) {
    constexpr uint32_t kNormal = 121u << 23;  // bits of 2^-6, the smallest normal
    const uint32_t bits = to_bits(y), size = bits & 0x7fffffffu, exponent = size & 0x7f800000u;
    const float part = (static_cast<float>(static_cast<int32_t>(r)) + 0.5f) * (1.0f / 256.0f);
    const float step = from_bits((exponent > kNormal ? exponent : kNormal) - (3u << 23));
    const float sum = from_bits(size) + part * step, t = sum < kE4M3Max ? sum : kE4M3Max;
    const uint32_t subnormal = static_cast<uint32_t>(static_cast<int32_t>(t * 512.0f));
    const uint32_t byte = to_bits(t) < kNormal ? subnormal : (to_bits(t) >> 20) - (120u << 3);
    return size > kInfBits ? 0x7fu : byte | (bits >> 24 & 0x80u);
}

// The smallest E4M3 scale with which no element of a block is above 6.
ZEROFP4_HD E4M3Magnitude covering_scale(float block_amax, const TensorScale& tensor) {
    const float wanted = min_float(block_amax * tensor.block_factor, kE4M3Max);
    const E4M3Magnitude nearest = round_to_e4m3(wanted);
    const uint32_t byte = nearest.byte + (nearest.value < wanted ? 1u : 0u);
    return {byte, e4m3_to_float(byte)};
}

}  // namespace zerofp4
