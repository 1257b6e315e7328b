#pragma once
// Reading a matrix by strips: a warp takes 16 rows by 128 columns, each lane 4 neighbouring columns of every
// row.

#include "common/layout.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/format/magnitudes.cuh"

namespace zerofp4::cuda {

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
using StripWords = uint32_t[kBlock][kLaneColumns / kPerWord<T>];

// A strip that is cut off or not aligned, element by element. Matrix and place are taken apart: given as they
// are, all kernels that call this are scheduled differently.
template <typename T>
__device__ __noinline__ void load_cut_strip(const T* data, int64_t rows, int64_t cols, int64_t row,
                                            int64_t col, uint32_t* words) {
    const T* input = data + row * cols + col;
    const int existing = clamp_count(rows - row, kBlock), count = clamp_count(cols - col, kLaneColumns);
#pragma unroll 1
    for (int r = 0; r < kBlock; ++r, input += cols) {
        float values[kLaneColumns];
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i)
            values[i] = r < existing && i < count ? load_float(input[i]) : 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneColumns / kPerWord<T>; ++i, ++words) {
            if constexpr (kPerWord<T> == 1) {
                *words = to_bits(values[i]);
            } else {
                *words = pack_word<T>({values[2 * i], values[2 * i + 1]});
            }
        }
    }
}

// Returns whether all lanes' elements exist, so that every row could be read by vectors. kLastUse as for
// load_words.
template <typename T, bool kLastUse = true>
__device__ __forceinline__ bool load_strip(const Matrix<T>& x, const StripPlace& at, StripWords<T>& words) {
    const T* input = x.data + at.row * x.cols + at.col;
    const int64_t strip_end = at.col + (kLanes - lane_index()) * kLaneColumns;
    if (at.row + kBlock <= x.rows && strip_end <= x.cols && x.cols % kLaneColumns == 0 &&
        is_aligned(x.data, kLaneColumns * static_cast<int>(sizeof(T)))) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) load_words<kLastUse>(input + r * x.cols, words[r]);
        return true;
    }
    StripWords<T> cut;  // in memory: `words` stays in registers
    load_cut_strip(x.data, x.rows, x.cols, at.row, at.col, cut[0]);
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
#pragma unroll
        for (int i = 0; i < kLaneColumns / kPerWord<T>; ++i) words[r][i] = cut[r][i];
    }
    return false;
}

// The same where x has halves, which are widened.
template <bool kLastUse>
__device__ __forceinline__ bool load_strip_of_halves(const Matrix<float>& x, const StripPlace& at,
                                                     StripWords<float>& words) {
    const Matrix<Float16> input{reinterpret_cast<const Float16*>(x.data), x.rows, x.cols};
    StripWords<Float16> halves;
    const bool whole = load_strip<Float16, kLastUse>(input, at, halves);
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
        float row[kLaneColumns];
        unpack<Float16>(halves[r], row);
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) words[r][i] = to_bits(row[i]);
    }
    return whole;
}

// Begins to fetch the strip of 16-bit elements at these indices to the L2 cache, a line a lane.
template <typename T>
__device__ __forceinline__ void prefetch_strip(const Matrix<T>& x, int64_t row, int64_t col) {
    constexpr int kLine = 128 / static_cast<int>(sizeof(T));
    static_assert(kBlock * kStripColumns == kLanes * kLine);
    row += lane_index() / 2, col += lane_index() % 2 * kLine;
    if (row < x.rows && col < x.cols) prefetch_line(x.data + row * x.cols + col);
}

// The largest magnitude of all of a lane's elements, as the bits of a float.
template <typename T>
__device__ __forceinline__ uint32_t strip_bits(const StripWords<T>& words) {
    uint32_t most = 0;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
#pragma unroll
        for (int i = 0; i < kLaneColumns / kPerWord<T>; ++i)
            most = largest<T>(most, magnitudes<T>(words[r][i]));
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
        float row[kLaneColumns];
        unpack<T>(words[r], row);
        x[r] = row[k];
    }
}

}  // namespace zerofp4::cuda
