#pragma once
// Floats to E2M1 codes and E4M3 bytes.

#include "common/e2m1.h"
#include "common/e4m3.h"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {

// Four codes in 16 bits, x[0] in the lowest nibble. A NaN must be positive, as every NaN is that an
// arithmetic instruction of the GPU gives.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000

// Blackwell's instruction (its family and architecture specific targets have it) rounds and saturates like
// float_to_e2m1, keeps the sign of -0, and gives the largest positive code for NaN; its first operand lands
// in the high nibble.
__device__ __forceinline__ uint32_t convert_four(const float (&x)[4]) {
    uint32_t codes;
    asm("{\n"
        "    .reg .b8 low, high, zero;\n"
        "    cvt.rn.satfinite.e2m1x2.f32 low, %2, %1;\n"
        "    cvt.rn.satfinite.e2m1x2.f32 high, %4, %3;\n"
        "    mov.b32 %0, {low, high, low, high};\n"
        "}\n"
        : "=r"(codes)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
    return codes & 0xffffu;
}

#else

// Without the sign.
__device__ __forceinline__ uint32_t code_bits(float x) {
    return biased_code(fminf(fabsf(x), kE2M1Max));  // 6 for NaN
}

__device__ __forceinline__ uint32_t convert_four(const float (&x)[4]) {
    // In bytes 0 and 1 the low bytes of two codes, or signs; bytes 2 and 3 are 0 or masked out.
    const uint32_t even = permute<0x1140>(code_bits(x[0]), code_bits(x[2]));
    const uint32_t odd = permute<0x1140>(code_bits(x[1]), code_bits(x[3]));
    const uint32_t even_signs = permute<0x00fb>(to_bits(x[0]), to_bits(x[2])) & 0x0808u;
    const uint32_t odd_signs = permute<0x0073>(to_bits(x[1]), to_bits(x[3])) & 0x8080u;
    return (even + odd * 16u) | even_signs | odd_signs;
}

#endif

// Four E4M3 bytes, x[0] in the lowest. A NaN must be positive here, too.
__device__ __forceinline__ uint32_t convert_four_e4m3(const float (&x)[4]) {
#if __CUDA_ARCH__ >= 890  // rounds and saturates like float_to_e4m3; its first operand lands in the high byte
    uint32_t bytes;
    asm("{\n"
        "    .reg .b16 low, high;\n"
        "    cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "    cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "    mov.b32 %0, {low, high};\n"
        "}\n"
        : "=r"(bytes)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
    return bytes;
#else
    return float_to_e4m3(x[0]) | float_to_e4m3(x[1]) << 8 | float_to_e4m3(x[2]) << 16 |
           float_to_e4m3(x[3]) << 24;
#endif
}

// The bits of a block's scale, of a product that is neither negative nor NaN.
__device__ __forceinline__ uint32_t convert_scale(float x) {
#if __CUDA_ARCH__ >= 890
    uint32_t byte;
    asm("{\n"
        "    .reg .b16 pair;\n"
        "    cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, %1;\n"
        "    cvt.u32.u16 %0, pair;\n"
        "}\n"
        : "=r"(byte)
        : "f"(x));
    return byte;
#else
    return magnitude_to_e4m3(x);
#endif
}

}  // namespace zerofp4::cuda
