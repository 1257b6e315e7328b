#pragma once
// Quantizing a strip of 16 rows by 128 columns along its columns, of which a lane has 4: blocks of 16x1, of
// the matrix or of its transform.

#include "cuda/format/transform.cuh"
#include "cuda/quantize/rows.cuh"

namespace zerofp4::cuda {

// Encodes the 16 values, of a 16-bit dtype, of the lane's column k. Returns the byte of their scale.
template <typename T, class Rounding>
__device__ __forceinline__ uint32_t encode_column(const Pairs (&values)[2], const Scales& scales,
                                                  const Rounding& rounding, int k, int strip,
                                                  TileBuffers<true>& tile) {
    Signs signs[2] = {Signs(values[0]), Signs(values[1])};
    uint32_t fours[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) fours[i] = larger_magnitudes<T>(values[0][i], values[1][i]);
    uint32_t most = larger_magnitudes<T>(larger_magnitudes<T>(fours[0], fours[1]),
                                         larger_magnitudes<T>(fours[2], fours[3]));
    most = widened<T>(larger_magnitudes<T>(most, most >> 16) & 0x7fffu);
    const uint32_t byte = scales.byte_of(most);
    const float factor = scales.factor_of(byte);
    const bool regular = Rounding::is_regular(most, factor);
    typename Rounding::Bytes random[kBlock / 4];
    rounding.column_bytes(k, random);
    uint32_t codes[2];
    Rounding::template encode_block<T>(values, signs, factor, regular, random, codes);
    tile.set_column(lane_index() * kLaneColumns + k, strip, codes);
    return byte;
}

// The same of floats, which are not rounded further.
template <class Rounding>
__device__ __forceinline__ uint32_t encode_column(const float (&x)[kBlock], const Scales& scales,
                                                  const Rounding& rounding, int k, int strip,
                                                  TileBuffers<true>& tile) {
    uint32_t most = 0;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) most = max(most, magnitude_bits(x[r]));
    const uint32_t byte = scales.byte_of(most);
    const float factor = scales.factor_of(byte);
    const bool regular = Rounding::is_regular(most, factor);
    typename Rounding::Bytes random[kBlock / 4];
    rounding.column_bytes(k, random);
    uint32_t codes[2];
    Rounding::encode_block(x, factor, regular, random, codes);
    tile.set_column(lane_index() * kLaneColumns + k, strip, codes);
    return byte;
}

// A column of 16 rows, given as words of two neighbouring columns.
template <typename T>
__device__ __forceinline__ void column_pairs(const uint32_t (&words)[kBlock], int k, Pairs (&values)[2]) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        if (i % 4 < 2)
            values[i / 8][i % 8 / 4 * 2 + i % 2] = __byte_perm(words[i], words[i + 2], k ? 0x7632 : 0x5410);
    }
}

// The same, transformed. `fits`: four times the transform has no value that is finite but infinite as a
// bfloat16, or none that matters.
__device__ __forceinline__ void transformed_pairs(const uint32_t (&words)[kBlock], int k, bool fits,
                                                  Pairs (&values)[2]) {
    float x[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
        float both[2];
        unpack<BFloat16>({words[r]}, both);
        x[r] = both[k];
    }
    transform<BFloat16>(x, kRandomSigns);
    if (!fits) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) x[r] = quarter(x[r]);
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        if (i % 4 < 2)
            values[i / 8][i % 8 / 4 * 2 + i % 2] = quarter_pair(pack_word<BFloat16>({x[i], x[i + 2]}), fits);
    }
}

// Two neighbouring columns of a 16-bit dtype. Returns the bytes of their scales.
template <typename T, Columns kColumns, class Rounding>
__device__ __forceinline__ uint32_t encode_columns(const uint32_t (&words)[kBlock], const Scales& scales,
                                                   const Rounding& rounding, int pair, int strip,
                                                   TileBuffers<true>& tile) {
    uint32_t bytes = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        Pairs values[2];
        if constexpr (kColumns == Columns::kHadamard) {
            transformed_pairs(words, k, scales.fits, values);
        } else {
            column_pairs<T>(words, k, values);
        }
        bytes |= encode_column<T>(values, scales, rounding, 2 * pair + k, strip, tile) << (8 * k);
    }
    return bytes;
}

// The dtype of which a columnwise copy's values are.
template <typename T, Columns kColumns>
using ColumnType = std::conditional_t<kColumns == Columns::kHadamard, BFloat16, T>;

// Blocks along the columns.
template <typename T, Columns kColumns, class Rounding>
__device__ __forceinline__ void quantize_columns(const StripWords<T>& words, const Scales& scales,
                                                 const Rounding& rounding, int strip,
                                                 TileBuffers<true>& tile) {
    uint32_t bytes = 0;
    if constexpr (kPerWord<T> == 2 || kColumns == Columns::kHadamard) {
        // The transform begins with rounding to bfloat16.
        using Rounded = ColumnType<T, kColumns>;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            uint32_t both[kBlock];
#pragma unroll
            for (int r = 0; r < kBlock; ++r) {
                if constexpr (std::is_same_v<T, Rounded>) {
                    both[r] = words[r][pair];
                } else {
                    float x[kLaneColumns];
                    unpack<T>(words[r], x);
                    both[r] = pack_word<BFloat16>({x[2 * pair], x[2 * pair + 1]});
                }
            }
            bytes |= encode_columns<Rounded, kColumns>(both, scales, rounding, pair, strip, tile)
                     << (16 * pair);
        }
    } else {
#pragma unroll
        for (int k = 0; k < kLaneColumns; ++k) {
            float x[kBlock];
            column_values<T>(words, k, x);
            bytes |= encode_column(x, scales, rounding, k, strip, tile) << (8 * k);
        }
    }
    tile.set_columnwise_scales(strip, bytes);
}

}  // namespace zerofp4::cuda
