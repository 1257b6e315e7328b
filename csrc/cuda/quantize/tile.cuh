#pragma once
// Quantizing a tile of 256 rows by 128 columns with a thread block: 1x16 blocks or 16x16 tiles, the rowwise
// and the columnwise copy, the transform of the columnwise one, scales in any layout, rounding to nearest or
// stochastically. A warp takes strips of 16 rows by 128 columns, each lane 4 neighbouring columns of every
// row: a block along the rows is 4 lanes, a block along the columns lies in one lane.

#include "cuda/device/tuning.cuh"
#include "cuda/format/scale_tile.cuh"
#include "cuda/quantize/columns.cuh"

namespace zerofp4::cuda {

template <typename T>
constexpr int kQuantizeBlocks =
    std::is_same_v<T, float> ? kTuning.quantize_floats_blocks : kTuning.quantize_blocks;

// Whether the input is read evict-first. Tiles with both copies reach 88% of a copy on an H200 without, and
// 83% with, the other kernels less without.
template <typename T, bool kTiles, Columns kColumns>
constexpr bool kReadsEvictFirst = kPerWord<T> == 1 || !kTiles || kColumns == Columns::kNone;

// Whether a warp's second strip is fetched to the L2 cache once its first is on its way. On an H200 tiles go
// from 90% to 94% of a copy so, with both copies from 91% to 92%; the other kernels lose up to 2 points.
template <typename T, bool kTiles, class Rounding>
constexpr bool kPrefetches = kPerWord<T> == 2 && kTiles && std::is_same_v<Rounding, Nearest>;

// What a thread block needs of its tensor's amaxes: factors by scale byte, for the rowwise copy and the
// columnwise one.
struct Tables {
    float encode[2][kScaleBytes];
    float block_factors[2];
    bool fits[2];  // transformed_pairs

    // Each half of the threads fills one.
    static __device__ __forceinline__ int side() { return static_cast<int>(threadIdx.x) / kScaleBytes; }

    // amax: of the thread's side.
    __device__ __forceinline__ void fill(float amax) {
        const uint32_t byte = threadIdx.x % kScaleBytes;
        const TensorScale tensor = tensor_scale(amax);
        encode[side()][byte] = block_encode(byte, tensor);
        if (byte == 0) block_factors[side()] = tensor.block_factor, fits[side()] = amax <= 0x1p126f;
    }

    __device__ __forceinline__ Scales scales(int side) const {
        return {block_factors[side], encode[side], fits[side]};
    }
};

// Returns x. What is computed from the result stays where it is: before the loop it would wait for x.
__device__ __forceinline__ float pin(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// dtype: of the elements. Kernels of floats read halves, too.
template <typename T, bool kLastUse>
__device__ __forceinline__ bool load_input(const Matrix<T>& x, DType dtype, const StripPlace& at,
                                           StripWords<T>& words) {
    if constexpr (std::is_same_v<T, float>) {
        if (dtype == DType::kFloat16) return load_strip_of_halves<kLastUse>(x, at, words);
    }
    return load_strip<T, kLastUse>(x, at, words);
}

// Which tile of a matrix, if there is one.
struct TilePlace {
    uint32_t down;
    uint32_t across;
    bool exists;
};

template <typename T, bool kTiles, Columns kColumns, class Rounding>
__device__ __forceinline__ void quantize_tile(const TileMatrix& matrix, const TilePlace& place) {
    __shared__ TileBuffers<kColumns != Columns::kNone> tile;
    __shared__ Tables tables;
    const QuantizeArgs& whole = matrix.whole;
    const bool is_columnwise = !kTiles && Tables::side() == 1 && whole.columnwise_amax;
    const float amax = *in_global(is_columnwise ? matrix.columnwise_amax() : matrix.amax());
    const bool rows_wanted = whole.rowwise_data || whole.values;
    const auto stored_rows = [&] {
        return kColumns == Columns::kHadamard ? round_up(matrix.rows(), kBlock) : matrix.rows();
    };
    Rounding rounding(matrix.rng_state());
    RowwiseScales<kTiles> rowwise;
    const int64_t col = int64_t{place.across} * kTileCols;
#pragma unroll 1
    for (int strip = warp_index(); strip < kTileStrips; strip += kWarps) {
        const StripPlace at = {int64_t{place.down * kTileStrips + strip} * kBlock,
                               col + lane_index() * kLaneColumns};
        // Before the input is there: together the two would take too many registers.
        if (kTiles || rows_wanted) rounding.draw_rows(at.row, col, whole.cols);
        const Matrix<T> input = matrix.input<T>();
        StripWords<T> words;
        const bool whole_strip =
            load_input<T, kReadsEvictFirst<T, kTiles, kColumns>>(input, whole.dtype, at, words);
        if (strip < kWarps) {  // the warp's first strip is on its way
            if constexpr (kPrefetches<T, kTiles, Rounding>)
                prefetch_strip<T>(input, at.row + kWarps * kBlock, col);
            if constexpr (kTiles) {
                rowwise = {tensor_scale(pin(amax))};
            } else {
                tables.fill(pin(amax));
                __syncthreads();
                rowwise = tables.scales(0);
            }
        }
        if (kTiles || rows_wanted)
            quantize_rows<T, kTiles, kColumns>(matrix, words, at, whole_strip, rowwise, rounding, strip,
                                               tile);
        if constexpr (!kTiles && kColumns != Columns::kNone) {
            rounding.draw_columns(at.row, at.col, stored_rows());
            if constexpr (kColumns == Columns::kHadamard) {
                if (!whole.signs) change_random_signs<T>(words);
            }
            quantize_columns<T, kColumns>(words, tables.scales(1), rounding, strip, tile);
        }
    }
    __syncthreads();
    constexpr int kShift = kTiles ? 4 : 0;
    const int64_t row = int64_t{place.down} * kTileRows;
    const int64_t rows = matrix.rows(), cols = whole.cols;
    const int64_t row_blocks = ceil_div(rows, kBlock), col_blocks = ceil_div(cols, kBlock);
    write_scales(
        ScaleTile<kTileRows, kTileScaleColumns, 0, false>{tile.rowwise_scale[0], kTileScaleColumns, rows,
                                                          col_blocks, row, col / kBlock, kShift},
        matrix.rowwise_scale().of);
    if constexpr (kColumns != Columns::kNone) {
        // A tile of 16x16 has the same scale in both orientations.
        const uint8_t* bytes = kTiles ? tile.rowwise_scale[0] : tile.columnwise_scale[0];
        write_scales(
            ScaleTile<kTileCols, kTileStrips, kThreads / 2, true>{
                bytes, kTiles ? kTileScaleColumns : kTileCols, cols, row_blocks, col, row / kBlock, kShift},
            matrix.columnwise_scale().of);
        write_columnwise(tile, matrix.columnwise_data(), cols, stored_rows() / 2, col, row / 2);
    }
}

}  // namespace zerofp4::cuda
