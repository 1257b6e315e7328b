// The packed transpose. A block takes a tile of 256 x 256 codes: rows of 128 bytes come in and rows of 128
// bytes go out, through shared memory; nibbles change places in registers. Tiles follow one another down the
// rows of the input, so that what blocks write at one time lies side by side: DRAM minds short runs of writes
// more than short runs of reads.

#include "common/args/transpose.h"
#include "cuda/device/tuning.cuh"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kLaneRows = 8;  // a thread reads 8 rows of 32 codes, 16 bytes each
constexpr int kLaneCodes = 32;
constexpr int kTileWords = kBlockTile / 8;  // of a row of the tile
constexpr int kLanesAcross = kBlockTile / kLaneCodes;
constexpr int kPasses = kBlockTile / (kThreads / kLanesAcross);
static_assert(kThreads / kLanesAcross * kLaneRows == kBlockTile && kLanesAcross * kVectorWords == kTileWords);

// The transposed tile. The vectors of a row change places so that neither side meets a bank twice: threads
// that write the same word of rows 32 apart, threads that read the vectors of one row.
struct Tile {
    alignas(16) uint32_t words[kBlockTile][kTileWords];

    __device__ __forceinline__ uint32_t& word(int row, int i) {
        return words[row][i ^ (row / kLaneCodes * kVectorWords)];
    }
    __device__ __forceinline__ const uint4& vector(int row, int i) {
        return *reinterpret_cast<const uint4*>(&word(row, i * kVectorWords));
    }
};

// What a block does: the tile's first row and column, and how much of it exists.
struct TilePlace {
    int64_t row;
    int64_t col;
    int rows;
    int cols;
};

__device__ __forceinline__ TilePlace place_of(const TransposeDescriptor& item, int64_t tile) {
    const uint32_t local = static_cast<uint32_t>(tile - item.tile_begin);
    const uint32_t down = static_cast<uint32_t>(ceil_div(item.rows, kBlockTile));
    const uint32_t across = local / down;
    const int64_t row = static_cast<int64_t>(local - across * down) * kBlockTile;
    const int64_t col = static_cast<int64_t>(across) * kBlockTile;
    return {row, col, clamp_count(item.rows - row, kBlockTile), clamp_count(item.cols - col, kBlockTile)};
}

template <bool kWhole>
__device__ __forceinline__ void load_tile(const TransposeDescriptor& item, const TilePlace& at, Tile& tile) {
    const int first_row = static_cast<int>(threadIdx.x) / kLanesAcross * kLaneRows;
    const int first_col = static_cast<int>(threadIdx.x) % kLanesAcross * kLaneCodes;
    const int64_t pitch = item.cols / 2;
    const uint8_t* input = in_global(item.input) + (at.row + first_row) * pitch + (at.col + first_col) / 2;
    uint32_t rows[kLaneRows][kVectorWords];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        if constexpr (kWhole) {
            load_words<true>(input + i * pitch, rows[i]);
        } else {
            const int count = first_row + i < at.rows ? clamp_count(at.cols - first_col, kLaneCodes) / 2 : 0;
            load16(input + i * pitch, count, rows[i]);
        }
    }
#pragma unroll
    for (int block = 0; block < kVectorWords; ++block) {
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) words[i] = rows[i][block];
        transpose_nibbles(words);
#pragma unroll
        for (int k = 0; k < 8; ++k) tile.word(first_col + 8 * block + k, first_row / kLaneRows) = words[k];
    }
}

template <bool kWhole>
__device__ __forceinline__ void store_tile(const TransposeDescriptor& item, const TilePlace& at, Tile& tile) {
    const int64_t pitch = item.rows / 2;
    const int i = static_cast<int>(threadIdx.x) % kLanesAcross;
    uint8_t* output = in_global(item.output) + at.col * pitch + at.row / 2 + 16 * i;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int row = (pass * kThreads + static_cast<int>(threadIdx.x)) / kLanesAcross;
        const uint4& vector = tile.vector(row, i);
        if constexpr (kWhole) {
            __stcs(reinterpret_cast<uint4*>(output + row * pitch), vector);
        } else if (row < at.cols) {
            const int count = clamp_count(at.rows / 2 - 16 * i, 16);
            store16(output + row * pitch, {vector.x, vector.y, vector.z, vector.w}, count);
        }
    }
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kTuning.transpose_blocks)
    transpose_kernel(const __grid_constant__ TransposeTable table,
                     const __grid_constant__ TransposeDescriptor single) {
    __shared__ Tile tile;
    wait_for_previous_kernel();
    ItemCursor<TransposeDescriptor, &TransposeDescriptor::tile_begin, kSingle> cursor(
        table.items, table.count, table.tiles, table.tile_items + blockIdx.x, single);
    cursor.seek(blockIdx.x);
    const TransposeDescriptor& item = cursor.item();
    const TilePlace at = place_of(item, blockIdx.x);
    const bool whole = at.rows == kBlockTile && at.cols == kBlockTile && item.cols % kLaneCodes == 0 &&
                       item.rows % kLaneCodes == 0 && is_aligned(item.input, 16) &&
                       is_aligned(item.output, 16);
    if (whole) {
        load_tile<true>(item, at, tile);
        __syncthreads();
        store_tile<true>(item, at, tile);
    } else {
        load_tile<false>(item, at, tile);
        __syncthreads();
        store_tile<false>(item, at, tile);
    }
}

}  // namespace

void transpose(const TransposeTable& table, const TransposeDescriptor* host, cudaStream_t stream) {
    if (table.tiles == 0) return;
    const auto kernel = table.count == 1 ? transpose_kernel<true> : transpose_kernel<false>;
    launch("transpose", kernel, table.tiles, stream, table, host[0]);
}

}  // namespace zerofp4::cuda
