#pragma once
// Magnitudes, compared as integers or two at a time.

#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// Magnitudes are compared as integers: the bits of non-negative floats sort like the floats, and those of
// NaN, which fmaxf would drop, above those of infinity.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return to_bits(x) & 0x7fffffffu; }

constexpr uint32_t kInfBits = 0x7f800000u;

// A maximum of magnitude bits as an amax: what is not finite counts as infinity.
__device__ __forceinline__ float amax_of_bits(uint32_t bits) { return from_bits(min(bits, kInfBits)); }

// The largest of magnitudes that are compared as integers: floats, or pairs of 16-bit ones.
template <typename T>
__device__ __forceinline__ uint32_t largest(uint32_t a, uint32_t b) {
    return kPerWord<T> == 1 ? max(a, b) : __vmaxu2(a, b);
}

template <typename T>
__device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    return word & (kPerWord<T> == 1 ? 0x7fffffffu : 0x7fff7fffu);
}

// The larger magnitudes of two pairs of 16-bit values; NaN is the largest. The signs of the result mean
// nothing.
template <typename T>
__device__ __forceinline__ uint32_t largest_magnitudes(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
    uint32_t most;
    if constexpr (std::is_same_v<T, BFloat16>) {
        asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    } else {
        asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    }
    return most;
#else
    return __vmaxu2(magnitudes<T>(a), magnitudes<T>(b));
#endif
}

// A 16-bit magnitude as the bits of a float.
template <typename T>
__device__ __forceinline__ uint32_t widened(uint32_t half) {
    return to_bits(load_float(T{static_cast<uint16_t>(half)}));
}

}  // namespace zerofp4::cuda
