#pragma once
// The random Hadamard transform of the 16 values that a lane has of a column.

#include "common/hadamard.h"
#include "common/layout.h"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// The last step of the transform (hadamard.h) in one operation: adding 0 rounds nothing, so that fused it
// gives the same.
__device__ __forceinline__ float quarter(float x) { return __fmaf_rn(x, 0.25f, 0.0f); }

// The same of two bfloat16 values, or, without a quarter, the values.
__device__ __forceinline__ uint32_t quarter_pair(uint32_t pair, bool quarter) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(pair), "r"(quarter ? 0x3e803e80u : 0x3f803f80u), "r"(quarter ? 0u : 0x80008000u));  // plus -0
    return result;
}

#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200

// Two floats that are added in one instruction. (It is no product that feeds the sum: ptxas would fuse them.)
struct FloatPair {
    uint64_t bits;

    FloatPair() = default;
    __device__ __forceinline__ FloatPair(float low, float high) {
        asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(low), "f"(high));
    }
    __device__ __forceinline__ void get(float& low, float& high) const {
        asm("mov.b64 {%0, %1}, %2;" : "=f"(low), "=f"(high) : "l"(bits));
    }
    __device__ __forceinline__ friend FloatPair operator+(FloatPair a, FloatPair b) {
        asm("add.rn.f32x2 %0, %0, %1;" : "+l"(a.bits) : "l"(b.bits));
        return a;
    }
    __device__ __forceinline__ friend FloatPair operator-(FloatPair a, FloatPair b) {
        asm("sub.rn.f32x2 %0, %0, %1;" : "+l"(a.bits) : "l"(b.bits));
        return a;
    }
};

// The stride of 1 is within pairs.
__device__ __forceinline__ void butterfly(float (&x)[kBlock], uint32_t signs) {
    change_signs(x, signs);
    butterfly_step(x, 1);
    FloatPair pairs[kBlock / 2];
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) pairs[i] = FloatPair(x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int stride = 1; stride < kBlock / 2; stride *= 2) butterfly_step(pairs, stride);
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) pairs[i].get(x[2 * i], x[2 * i + 1]);
}

#endif

// Four times the random Hadamard transform of values of T, not yet rounded to bfloat16. Constant signs become
// negations inside of the first additions.
template <typename T>
__device__ __forceinline__ void transform(float (&x)[kBlock], uint32_t signs) {
    if constexpr (!std::is_same_v<T, BFloat16>) round_all<BFloat16>(x);
    butterfly(x, signs);
}

// Before a transform that is to be without random signs: those that it brings cancel these out.
template <typename T, int kWords>
__device__ __forceinline__ void change_random_signs(uint32_t (&rows)[kBlock][kWords]) {
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if (kRandomSigns >> r & 1u) rows[r][i] ^= kPerWord<T> == 1 ? 0x80000000u : 0x80008000u;
        }
    }
}

}  // namespace zerofp4::cuda
