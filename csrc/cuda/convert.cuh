#pragma once
// Floats to E2M1 codes, and magnitudes as integers.

#include "common/e2m1.h"

namespace zerofp4::cuda {

// Two codes in a byte, `low` in the low nibble. Blackwell's instruction (its family and architecture specific
// targets have it) rounds and saturates like float_to_e2m1, keeps the sign of -0, and gives the largest
// positive code for NaN; its first operand lands in the high nibble.
__device__ __forceinline__ uint32_t convert_pair(float low, float high) {
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
    uint32_t byte;
    asm("{\n"
        "    .reg .b8 pair;\n"
        "    cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1;\n"
        "    cvt.u32.u8 %0, pair;\n"
        "}\n"
        : "=r"(byte)
        : "f"(low), "f"(high));
    return byte;
#else
    return float_to_e2m1(low) | float_to_e2m1(high) << 4;
#endif
}

// Magnitudes are compared as integers: the bits of non-negative floats sort like the floats, and those of
// NaN, which fmaxf would drop, above those of infinity.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return to_bits(x) & 0x7fffffffu; }

constexpr uint32_t kInfBits = 0x7f800000u;

// A maximum of magnitude bits as an amax: what is not finite counts as infinity.
__device__ __forceinline__ float amax_of_bits(uint32_t bits) { return from_bits(min(bits, kInfBits)); }

}  // namespace zerofp4::cuda
