#pragma once
// Magnitudes (bits.h) of words that hold one float or two 16-bit values.

#include "common/bits.h"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// The largest of magnitudes that are compared as integers: floats, or pairs of 16-bit ones.
template <typename T>
__device__ __forceinline__ uint32_t largest(uint32_t a, uint32_t b) {
    return kPerWord<T> == 1 ? max(a, b) : __vmaxu2(a, b);
}

template <typename T>
__device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    return word & (kPerWord<T> == 1 ? 0x7fffffffu : 0x7fff7fffu);
}

// The larger magnitude of each element of two words: a float, or a pair of 16-bit values. NaN is the largest.
// The signs of the result mean nothing: from sm_86 on the instruction takes the magnitudes itself, and gives
// the result the product of the signs.
#if __CUDA_ARCH__ >= 860
#define ZEROFP4_MAX "max.NaN.xorsign.abs."
#else
#define ZEROFP4_MAX "max.NaN."
#endif
template <typename T>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ < 860
    a = magnitudes<T>(a), b = magnitudes<T>(b);
#endif
    uint32_t result;
    if constexpr (std::is_same_v<T, float>) {
        asm(ZEROFP4_MAX "f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else if constexpr (std::is_same_v<T, BFloat16>) {
        asm(ZEROFP4_MAX "bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else {
        asm(ZEROFP4_MAX "f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
}

// A 16-bit magnitude as the bits of a float.
template <typename T>
__device__ __forceinline__ uint32_t widened(uint32_t half) {
    return to_bits(load_float(T{static_cast<uint16_t>(half)}));
}

}  // namespace zerofp4::cuda
