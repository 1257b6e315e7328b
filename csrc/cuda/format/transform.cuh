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

// Four times the random Hadamard transform of values of T, not yet rounded to bfloat16.
template <typename T>
__device__ __forceinline__ void transform(float (&x)[kBlock], uint32_t signs) {
    if constexpr (!std::is_same_v<T, BFloat16>) round_all<BFloat16>(x);
    butterfly(x, signs);
}

}  // namespace zerofp4::cuda
