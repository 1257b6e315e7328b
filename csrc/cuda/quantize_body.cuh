#pragma once
// Quantizing a tile of 256 rows by 128 columns with a thread block: 1x16 blocks or 16x16 tiles, the rowwise
// and the columnwise copy, the transform of the columnwise one, scales in any layout, rounding to nearest or
// stochastically. A warp takes strips of 16 rows by 128 columns, each lane 4 neighbouring columns of every
// row: a block along the rows is 4 lanes, a block along the columns lies in one lane.

#include "common/hadamard.h"
#include "cuda/quantize_rows.cuh"

namespace zerofp4::cuda {

// Writes the codes and the scale of the lane's column k.
__device__ __forceinline__ void keep_column(TileBuffers& tile, int k, int strip, uint32_t byte,
                                            const uint32_t (&codes)[2]) {
    const int column = lane_index() * kLaneCols + k;
    tile.set_column(column, strip, codes[0], codes[1]);
    tile.columnwise_scale[column][strip] = static_cast<uint8_t>(byte);
}

// The 16 values of a column of a 16-bit dtype.
template <typename T, class Rounding>
__device__ __forceinline__ void encode_column(const Pairs (&values)[2], const Scales& scales,
                                              const Rounding& rounding, int k, int strip, TileBuffers& tile) {
    Signs signs[2] = {Signs(values[0]), Signs(values[1])};
    Pairs magnitude[2];
    uint32_t most = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            magnitude[h][i] = magnitudes<T>(values[h][i]);
            asm("" : "+r"(magnitude[h][i]));  // kept: masking halves again later takes more
            most = __vmaxu2(most, magnitude[h][i]);
        }
    }
    most = widened<T>(max(most & 0xffffu, most >> 16));
    const uint32_t byte = scales.byte_of(most);
    const float factor = scales.encode[byte];
    const bool regular = Rounding::is_regular(most, factor);
    typename Rounding::Bytes random[kBlock / 4];
    rounding.column_bytes(k, random);
    uint32_t codes[2];
    Rounding::template encode_block<T>(magnitude, signs, factor, regular, random, codes);
    keep_column(tile, k, strip, byte, codes);
}

// Encodes 16 values that are not rounded further.
template <class Rounding>
__device__ __forceinline__ void encode_column(const float (&x)[kBlock], const Scales& scales,
                                              const Rounding& rounding, int k, int strip, TileBuffers& tile) {
    uint32_t most = 0;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) most = max(most, magnitude_bits(x[r]));
    const uint32_t byte = scales.byte_of(most);
    const float factor = scales.encode[byte];
    const bool regular = Rounding::is_regular(most, factor);
    typename Rounding::Bytes random[kBlock / 4];
    rounding.column_bytes(k, random);
    uint32_t codes[2];
    Rounding::encode_block(x, factor, regular, random, codes);
    keep_column(tile, k, strip, byte, codes);
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
template <Columns kColumns>
__device__ __forceinline__ void transformed_pairs(const uint32_t (&words)[kBlock], int k, bool fits,
                                                  Pairs (&values)[2]) {
    float x[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) {
        float both[2];
        unpack<BFloat16>({words[r]}, both);
        x[r] = both[k];
    }
    // Constant signs become negations inside of the first additions.
    butterfly(x, kColumns == Columns::kRandomHadamard ? kRandomSigns : 0u);
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

// Two neighbouring columns of a 16-bit dtype.
template <typename T, Columns kColumns, class Rounding>
__device__ __forceinline__ void encode_columns(const uint32_t (&words)[kBlock], const Scales& scales,
                                               const Rounding& rounding, int pair, int strip,
                                               TileBuffers& tile) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        Pairs values[2];
        if constexpr (is_transformed(kColumns)) {
            transformed_pairs<kColumns>(words, k, scales.fits, values);
        } else {
            column_pairs<T>(words, k, values);
        }
        encode_column<T>(values, scales, rounding, 2 * pair + k, strip, tile);
    }
}

// The dtype of which a columnwise copy's values are.
template <typename T, Columns kColumns>
using ColumnType = std::conditional_t<is_transformed(kColumns), BFloat16, T>;

// Blocks along the columns.
template <typename T, Columns kColumns, class Rounding>
__device__ __forceinline__ void quantize_columns(const StripWords<T>& words, const Scales& scales,
                                                 const Rounding& rounding, int strip, TileBuffers& tile) {
    if constexpr (kPerWord<T> == 2 || is_transformed(kColumns)) {
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
                    float x[kLaneCols];
                    unpack<T>(words[r], x);
                    both[r] = pack_word<BFloat16>({x[2 * pair], x[2 * pair + 1]});
                }
            }
            encode_columns<Rounded, kColumns>(both, scales, rounding, pair, strip, tile);
        }
    } else {
#pragma unroll
        for (int k = 0; k < kLaneCols; ++k) {
            float x[kBlock];
            column_values<T>(words, k, x);
            encode_column(x, scales, rounding, k, strip, tile);
        }
    }
}

// Registers for as many blocks on a multiprocessor.
template <typename T>
constexpr int kQuantizeBlocksPerSm = std::is_same_v<T, float> ? 2 : 3;

// What a thread block needs of its tensor's amaxes: factors by scale byte, for the rowwise copy and the
// columnwise one.
struct Tables {
    float encode[2][kScaleBytes];
    float block_factors[2];

    // By half of the threads each.
    __device__ __forceinline__ void fill(float amax, float columnwise_amax) {
        const int side = static_cast<int>(threadIdx.x) / kScaleBytes;
        const uint32_t byte = threadIdx.x % kScaleBytes;
        const TensorScale tensor = tensor_scale(side == 0 ? amax : columnwise_amax);
        encode[side][byte] = block_encode(byte, tensor);
        if (byte == 0) block_factors[side] = tensor.block_factor;
    }
};

// The tile of a matrix that begins at an element of it. Rows from `input_rows` on are zeros that are not in
// the input.
template <typename T, bool kTiles, Columns kColumns, class Rounding = Nearest>
__device__ __forceinline__ void quantize_tile(const QuantizeArgs& args, int64_t row, int64_t col,
                                              int64_t input_rows) {
    __shared__ TileBuffers tile;
    __shared__ Tables tables;
    const float amax = *args.amax;
    const float columnwise_amax = args.columnwise_amax ? *args.columnwise_amax : amax;
    tables.fill(amax, columnwise_amax);
    __syncthreads();
    const Scales rowwise = {tables.block_factors[0], tables.encode[0], true};
    const Scales columnwise = {tables.block_factors[1], tables.encode[1], columnwise_amax <= 0x1p126f};
    const bool rows_wanted = args.rowwise_data || args.values;
    const int64_t stored = is_transformed(kColumns) ? round_up(args.rows, kBlock) : args.rows;
    Rounding rounding(args);
#pragma unroll 1
    for (int strip = warp_index(); strip < kTileStrips; strip += kWarps) {
        const StripPlace at = {row + strip * kBlock, col + lane_index() * kLaneCols};
        // Before the input is there: together the two would take too many registers.
        if (kTiles || rows_wanted) rounding.draw_rows(at.row, col, args.cols);
        StripWords<T> words;
        const bool whole =
            load_strip<T>({static_cast<const T*>(args.input), input_rows, args.cols}, at, words);
        if (kTiles || rows_wanted)
            quantize_rows<T, kTiles, kColumns>(args, words, at, whole, rowwise, rounding, amax, strip, tile);
        if constexpr (!kTiles && kColumns != Columns::kNone) {
            rounding.draw_columns(at.row, at.col, stored);
            quantize_columns<T, kColumns>(words, columnwise, rounding, strip, tile);
        }
    }
    __syncthreads();
    constexpr int kShift = kTiles ? 4 : 0;
    const int64_t row_blocks = ceil_div(args.rows, kBlock), col_blocks = ceil_div(args.cols, kBlock);
    write_scales(ScaleTile<kTileRows, kTileScaleColumns, 0>{tile.rowwise_scale, args.rows, col_blocks, row,
                                                            col / kBlock, kShift},
                 args.rowwise_scale);
    if constexpr (kColumns != Columns::kNone) {
        write_scales(ScaleTile<kTileCols, kTileStrips, kThreads / 2>{tile.columnwise_scale, args.cols,
                                                                     row_blocks, col, row / kBlock, kShift},
                     args.columnwise_scale);
        write_columnwise(tile, args.columnwise_data, args.cols, stored / 2, col, row / 2);
    }
}

}  // namespace zerofp4::cuda
