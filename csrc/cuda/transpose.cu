// The packed transpose. A warp takes half a tile, 64 rows of 128 codes, without shared memory: a lane reads
// 32 rows of 8 codes, so that the warp reads runs of 64 bytes, and ends with 16 bytes of 8 output rows.

#include "common/table.h"
#include "cuda/nibbles.cuh"
#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kTransposeBlocksPerSm = 4;
constexpr int kLaneCols = 8;
constexpr int kHalfRows = kTransposeTile / 2;
constexpr int kLanesAcross = kTransposeTile / kLaneCols;
static_assert(kLanes / kLanesAcross * kLaneRows == kHalfRows);

// Rows [row, row + kLaneRows) and columns [col, col + kLaneCols), all inside, both sides aligned.
__device__ __forceinline__ void transpose_whole(const TransposeDescriptor& item, int64_t row, int64_t col) {
    const int64_t pitch = item.cols / 2;
    const uint8_t* input = in_global(item.input) + row * pitch + col / 2;
    uint32_t words[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) words[i] = *reinterpret_cast<const uint32_t*>(input + i * pitch);
    transpose_nibbles(words);
    const int64_t out_pitch = item.rows / 2;
    uint8_t* output = in_global(item.output) + col * out_pitch + row / 2;
#pragma unroll
    for (int k = 0; k < kLaneCols; ++k) {
        *reinterpret_cast<uint4*>(output + k * out_pitch) =
            make_uint4(words[k], words[8 + k], words[16 + k], words[24 + k]);
    }
}

// The same for what may be cut off or unaligned.
__device__ __forceinline__ void transpose_part(const TransposeDescriptor& item, int64_t row, int64_t col) {
    const int rows = clamp_count(item.rows - row, kLaneRows);
    const int cols = clamp_count(item.cols - col, kLaneCols);
    const int64_t pitch = item.cols / 2;
    const uint8_t* input = in_global(item.input) + row * pitch + col / 2;
    uint32_t words[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) words[i] = i < rows ? load4(input + i * pitch, cols / 2) : 0u;
    transpose_nibbles(words);
    const int64_t out_pitch = item.rows / 2;
    uint8_t* output = in_global(item.output) + col * out_pitch + row / 2;
#pragma unroll
    for (int k = 0; k < kLaneCols; ++k) {
        const uint32_t column[4] = {words[k], words[8 + k], words[16 + k], words[24 + k]};
        if (k < cols) store16(output + k * out_pitch, column, rows / 2);
    }
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kTransposeBlocksPerSm)
    transpose_kernel(const __grid_constant__ TransposeTable table,
                     const __grid_constant__ TransposeDescriptor single) {
    ItemCursor<TransposeDescriptor, &TransposeDescriptor::tile_begin, kSingle> cursor(
        table.items, table.count, table.tiles, single);
    for (int64_t half = grid_warp(); half < 2 * table.tiles; half += grid_warps()) {
        const int64_t tile = half / 2;
        cursor.seek(tile);
        const TransposeDescriptor& item = cursor.item();
        const int64_t local = tile - item.tile_begin;
        const int64_t tile_columns = ceil_div(item.cols, kTransposeTile);
        const int64_t tile_row = local / tile_columns;
        const int64_t first_row = tile_row * kTransposeTile + half % 2 * kHalfRows;
        const int64_t first_col = (local - tile_row * tile_columns) * kTransposeTile;
        const int64_t row = first_row + lane_index() / kLanesAcross * kLaneRows;
        const int64_t col = first_col + lane_index() % kLanesAcross * kLaneCols;
        const bool inside = first_row + kHalfRows <= item.rows && first_col + kTransposeTile <= item.cols;
        const bool aligned = item.cols % kLaneCols == 0 && item.rows % kLaneRows == 0 &&
                             is_aligned(item.input, 4) && is_aligned(item.output, 16);
        if (inside && aligned) {
            transpose_whole(item, row, col);
        } else {
            transpose_part(item, row, col);
        }
    }
}

}  // namespace

void transpose(const TransposeTable& table, const TransposeDescriptor* host, cudaStream_t stream) {
    if (table.tiles == 0) return;
    const auto kernel = table.count == 1 ? transpose_kernel<true> : transpose_kernel<false>;
    launch("transpose", kernel, ceil_div(2 * table.tiles, kWarps), kTransposeBlocksPerSm, stream, table,
           host[0]);
}

}  // namespace zerofp4::cuda
