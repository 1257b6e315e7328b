#pragma once
// The largest magnitude of a part of a matrix and that of its transform along the columns, in one pass. A
// warp takes strips of 16 rows by 128 columns, each lane 4 neighbouring columns of every row.

#include "common/args/quantize.h"
#include "cuda/device/raise.cuh"
#include "cuda/format/transform.cuh"
#include "cuda/strip/matrix_strip.cuh"

namespace zerofp4::cuda {

constexpr int kAmaxTurns = 2;  // strips of a warp

// Thread blocks for a matrix.
ZEROFP4_HD int64_t amax_parts(int64_t rows, int64_t cols) {
    return ceil_div(ceil_div(rows, kBlock) * ceil_div(cols, kStripColumns), kAmaxTurns * kWarps);
}

// The largest magnitude bits of four times the transformed columns, not rounded to bfloat16: both are
// monotone.
template <typename T>
__device__ __forceinline__ uint32_t transformed_bits(const StripWords<T>& words, uint32_t signs) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kLaneColumns; ++k) {
        float x[kBlock];
        column_values<T>(words, k, x);
        // Constant signs become negations inside of the first additions.
        if (signs) {
            transform<T>(x, kRandomSigns);
        } else {
            transform<T>(x, 0);
        }
#pragma unroll
        for (int r = 0; r < kBlock; ++r) bits = max(bits, magnitude_bits(x[r]));
    }
    return bits;
}

// Part `index` of a matrix, counted along its rows of strips.
template <typename T, bool kTransform>
__device__ __forceinline__ void raise_amaxes(const AmaxArgs& args, uint32_t index) {
    const uint32_t across = static_cast<uint32_t>(ceil_div(args.cols, kStripColumns));
    const int64_t strips = ceil_div(args.rows, kBlock) * across;
    uint32_t bits = 0, transformed = 0;
#pragma unroll 1
    for (int turn = 0; turn < kAmaxTurns; ++turn) {
        const int64_t strip = (static_cast<int64_t>(index) * kAmaxTurns + turn) * kWarps + warp_index();
        if (strip >= strips) break;
        const uint32_t down = static_cast<uint32_t>(strip) / across;
        const int64_t col =
            static_cast<int64_t>(static_cast<uint32_t>(strip) - down * across) * kStripColumns;
        StripWords<T> words;
        load_strip<T>({static_cast<const T*>(args.input), args.rows, args.cols},
                      {static_cast<int64_t>(down) * kBlock, col + lane_index() * kLaneColumns}, words);
        bits = max(bits, strip_bits<T>(words));
        if constexpr (kTransform) transformed = max(transformed, transformed_bits<T>(words, args.signs));
    }
    if (args.amax) raise_group(args.amax, amax_of_bits(bits));
    if constexpr (kTransform) {
        const float rounded = round_to<BFloat16>(quarter(from_bits(transformed)));
        raise_group(args.hadamard_amax, amax_of_bits(magnitude_bits(rounded)));
    }
}

}  // namespace zerofp4::cuda
