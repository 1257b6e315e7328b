#pragma once
// Quantizing a tile of 256 rows by 128 columns with a thread block, rounding to nearest: 1x16 blocks or 16x16
// tiles, the rowwise and the columnwise copy, the transform of the columnwise one, scales in any layout. A
// warp takes strips of 16 rows by 128 columns, each lane 4 neighbouring columns of every row: a block along
// the rows is 4 lanes, a block along the columns lies in one lane.

#include "common/hadamard.h"
#include "cuda/quantize_rows.cuh"

namespace zerofp4::cuda {

using WaitingPairs = uint32_t[kWarps][kBlock][kLanes];

// The largest magnitude of 16 values, as the bits of a float. Values of a 16-bit dtype are compared in pairs,
// and come back rounded to it.
template <typename T>
__device__ __forceinline__ uint32_t round_column(float (&x)[kBlock]) {
    uint32_t most = 0;
    if constexpr (kPerWord<T> == 1) {
#pragma unroll
        for (int r = 0; r < kBlock; ++r) most = max(most, magnitude_bits(x[r]));
        return most;
    } else {
        uint32_t words[kBlock / 2];
#pragma unroll
        for (int i = 0; i < kBlock / 2; ++i) {
            words[i] = pack_word<T>({x[2 * i], x[2 * i + 1]});
            most = __vmaxu2(most, magnitudes<T>(words[i]));
        }
        unpack<T>(words, x);
        return widened<T>(max(most & 0xffffu, most >> 16));
    }
}

// Encodes the 16 values of a column of the tile, of dtype T once they are rounded.
template <typename T>
__device__ __forceinline__ void encode_column(float (&x)[kBlock], const Scales& scales, int column, int strip,
                                              TileBuffers& tile) {
    const uint32_t byte = scales.byte_of(round_column<T>(x));
    const float encode = scales.encode[byte];
    uint32_t fours[kBlock / 4];
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) {
        fours[i] = convert_four(
            {x[4 * i] * encode, x[4 * i + 1] * encode, x[4 * i + 2] * encode, x[4 * i + 3] * encode});
    }
    tile.set_column(column, strip, fours[0] | fours[1] << 16, fours[2] | fours[3] << 16);
    tile.columnwise_scale[column][strip] = static_cast<uint8_t>(byte);
}

// Pairs of neighbouring columns of a 16-bit dtype, one pair after the other: the second waits in shared
// memory, because a loop over registers would have to be unrolled, and then keeps all of them alive and takes
// more instructions than the cache holds.
template <typename T, Columns kColumns>
__device__ __forceinline__ void encode_pairs(const uint32_t (&pairs)[kBlock][2], const Scales& scales,
                                             int strip, TileBuffers& tile, WaitingPairs& waiting) {
    uint32_t words[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
        words[r] = pairs[r][0];
        waiting[warp_index()][r][lane_index()] = pairs[r][1];
    }
#pragma unroll 1
    for (int column = lane_index() * kLaneCols;; column += 2) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float x[kBlock];
#pragma unroll
            for (int r = 0; r < kBlock; ++r) {
                const uint32_t word[1] = {words[r]};
                float both[2];
                unpack<T>(word, both);
                x[r] = both[k];
            }
            // Constant signs become negations inside of the first additions.
            if constexpr (is_transformed(kColumns)) {
                butterfly(x, kColumns == Columns::kRandomHadamard ? kRandomSigns : 0u);
#pragma unroll
                for (int r = 0; r < kBlock; ++r) x[r] = quarter(x[r]);
            }
            encode_column<T>(x, scales, column + k, strip, tile);
        }
        if (column % kLaneCols != 0) return;
#pragma unroll
        for (int r = 0; r < kBlock; ++r) words[r] = waiting[warp_index()][r][lane_index()];
    }
}

// Blocks along the columns.
template <typename T, Columns kColumns>
__device__ __forceinline__ void quantize_columns(const StripWords<T>& words, const Scales& scales, int strip,
                                                 TileBuffers& tile, WaitingPairs& waiting) {
    if constexpr (is_transformed(kColumns) && !std::is_same_v<T, BFloat16>) {
        // The transform begins with rounding to bfloat16.
        uint32_t pairs[kBlock][2];
#pragma unroll
        for (int r = 0; r < kBlock; ++r) {
            float x[kLaneCols];
            unpack<T>(words[r], x);
            pairs[r][0] = pack_word<BFloat16>({x[0], x[1]});
            pairs[r][1] = pack_word<BFloat16>({x[2], x[3]});
        }
        encode_pairs<BFloat16, kColumns>(pairs, scales, strip, tile, waiting);
    } else if constexpr (kPerWord<T> == 2) {
        encode_pairs<T, kColumns>(words, scales, strip, tile, waiting);
    } else {
#pragma unroll
        for (int k = 0; k < kLaneCols; ++k) {
            float x[kBlock];
            column_values<T>(words, k, x);
            encode_column<T>(x, scales, lane_index() * kLaneCols + k, strip, tile);
        }
    }
}

// Registers for as many blocks on a multiprocessor.
template <typename T, Columns kColumns>
constexpr int kQuantizeBlocksPerSm = std::is_same_v<T, float> ? 2 : 3;

// Tile `index` of a matrix, counted down its columns. Rows of it from `input_rows` on are zeros that are not
// in the input.
template <typename T, bool kTiles, Columns kColumns>
__device__ __forceinline__ void quantize_tile(const QuantizeArgs& args, uint32_t index, int64_t input_rows) {
    __shared__ TileBuffers tile;
    __shared__ float encode[2][kScaleBytes];
    __shared__ WaitingPairs waiting;
    const float amax = *args.amax;
    const float columnwise_amax = args.columnwise_amax ? *args.columnwise_amax : amax;
    const Scales rowwise = {tensor_scale(amax).block_factor, encode[0]};
    const Scales columnwise = {tensor_scale(columnwise_amax).block_factor, encode[1]};
    const int side = static_cast<int>(threadIdx.x) / kScaleBytes,
              byte = static_cast<int>(threadIdx.x) % kScaleBytes;
    encode[side][byte] = block_encode(byte, tensor_scale(side == 0 ? amax : columnwise_amax));
    __syncthreads();
    const uint32_t down = static_cast<uint32_t>(ceil_div(args.rows, kTileRows));
    const uint32_t across = index / down;
    const int64_t row = static_cast<int64_t>(index - across * down) * kTileRows;
    const int64_t col = static_cast<int64_t>(across) * kTileCols;
    const bool rows_wanted = args.rowwise_data || args.values;
#pragma unroll 1
    for (int strip = warp_index(); strip < kTileStrips; strip += kWarps) {
        const StripPlace at = {row + strip * kBlock, col + lane_index() * kLaneCols};
        StripWords<T> words;
        const bool whole =
            load_strip<T>({static_cast<const T*>(args.input), input_rows, args.cols}, at, words);
        if (kTiles || rows_wanted)
            quantize_rows<T, kTiles, kColumns>(args, words, at, whole, rowwise, amax, strip, tile);
        if constexpr (!kTiles && kColumns != Columns::kNone)
            quantize_columns<T, kColumns>(words, columnwise, strip, tile, waiting);
    }
    __syncthreads();
    constexpr int kShift = kTiles ? 4 : 0;
    const int64_t row_blocks = ceil_div(args.rows, kBlock), col_blocks = ceil_div(args.cols, kBlock);
    write_scales(ScaleTile<kTileRows, kTileScaleColumns>{tile.rowwise_scale, args.rows, col_blocks, row,
                                                         col / kBlock, kShift},
                 args.rowwise_scale);
    if constexpr (kColumns != Columns::kNone) {
        write_scales(ScaleTile<kTileCols, kTileStrips>{tile.columnwise_scale, args.cols, row_blocks, col,
                                                       row / kBlock, kShift},
                     args.columnwise_scale);
        const int64_t stored = is_transformed(kColumns) ? round_up(args.rows, kBlock) : args.rows;
        write_columnwise(tile, args.columnwise_data, args.cols, stored / 2, col, row / 2);
    }
}

}  // namespace zerofp4::cuda
