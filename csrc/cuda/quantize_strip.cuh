#pragma once
// Reading a matrix by strips: a warp takes 16 rows by 128 columns, each lane 4 neighbouring columns of every
// row.

#include "common/hadamard.h"
#include "common/single.h"
#include "common/table.h"
#include "cuda/convert.cuh"
#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {

constexpr int kLaneCols = 4;
static_assert(kLanes * kLaneCols == kStripColumns);

template <typename T>
struct Matrix {
    const T* data;
    int64_t rows;
    int64_t cols;
};

struct StripPlace {
    int64_t row;  // of the strip
    int64_t col;  // of the lane
};

// A lane's elements of a strip as they were read; 0 past the edges.
template <typename T>
using StripWords = uint32_t[kBlock][kLaneCols / kPerWord<T>];

// Returns whether all lanes' elements exist, so that every row could be read by vectors.
template <typename T>
__device__ __forceinline__ bool load_strip(const Matrix<T>& x, const StripPlace& at, StripWords<T>& words) {
    const T* input = x.data + at.row * x.cols + at.col;
    const int64_t strip_end = at.col + (kLanes - lane_index()) * kLaneCols;
    if (at.row + kBlock <= x.rows && strip_end <= x.cols && x.cols % kLaneCols == 0 &&
        is_aligned(x.data, kLaneCols * static_cast<int>(sizeof(T)))) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) load_words<true>(input + r * x.cols, words[r]);
        return true;
    }
    const int rows = clamp_count(x.rows - at.row, kBlock);
    const int cols = clamp_count(x.cols - at.col, kLaneCols);
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
        float values[kLaneCols];
        load_elements(input + r * x.cols, r < rows ? cols : 0, values);
#pragma unroll
        for (int i = 0; i < kLaneCols / kPerWord<T>; ++i) {
            if constexpr (kPerWord<T> == 1) {
                words[r][i] = to_bits(values[i]);
            } else {
                words[r][i] = pack_word<T>({values[2 * i], values[2 * i + 1]});
            }
        }
    }
    return false;
}

// The largest of magnitudes that are compared as integers (convert.cuh): floats, or pairs of 16-bit ones.
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

// The largest magnitude of all of a lane's elements, as the bits of a float.
template <typename T>
__device__ __forceinline__ uint32_t strip_bits(const StripWords<T>& words) {
    uint32_t most = 0;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
#pragma unroll
        for (int i = 0; i < kLaneCols / kPerWord<T>; ++i) most = largest<T>(most, magnitudes<T>(words[r][i]));
    }
    if constexpr (kPerWord<T> == 1) {
        return most;
    } else {
        return widened<T>(max(most & 0xffffu, most >> 16));
    }
}

// The strip's 16 values of one of the lane's columns.
template <typename T>
__device__ __forceinline__ void column_values(const StripWords<T>& words, int k, float (&x)[kBlock]) {
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
        float row[kLaneCols];
        unpack<T>(words[r], row);
        x[r] = row[k];
    }
}

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
