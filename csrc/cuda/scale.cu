// Block scales of every tile from the reduced amaxes, in each layout and orientation that has a buffer. A
// warp takes 8 x 8 tiles: two whole swizzle atoms rowwise and two columnwise.

#include "common/scale.h"
#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kScaleBlocksPerSm = 4;
static_assert(kScaleTiles == 8 && kScaleTiles * kBlock == kAtomRows && kScaleTiles == 2 * kAtomColumns);

// Scale bytes of the warp's 8 x 8 tiles, 0 outside of the weight. With i = lane / 8 and j = lane % 8, a lane
// has those of the tiles (i, j) and (4 + i, j).
struct TileBytes {
    uint32_t upper;
    uint32_t lower;
};

// Tile (i, j) of the result is tile (j, i).
__device__ __forceinline__ TileBytes transposed(const TileBytes& bytes) {
    // The lane that has tile (lane % 8, lane / 8), in its upper or lower half; the other one is 4 columns on.
    const int source = lane_index() % 4 * 8 + lane_index() / 8;
    const bool from_upper = lane_index() % 8 < 4;
    const uint32_t upper_left = __shfl_sync(kAllLanes, bytes.upper, source);
    const uint32_t lower_left = __shfl_sync(kAllLanes, bytes.lower, source);
    const uint32_t upper_right = __shfl_sync(kAllLanes, bytes.upper, source + 4);
    const uint32_t lower_right = __shfl_sync(kAllLanes, bytes.lower, source + 4);
    return {from_upper ? upper_left : lower_left, from_upper ? upper_right : lower_right};
}

// The bytes of four neighbouring lanes, lane % 4 == 0 lowest.
__device__ __forceinline__ uint32_t quad_word(uint32_t byte) {
    uint32_t word = byte << (8 * (lane_index() % 4));
    word |= __shfl_xor_sync(kAllLanes, word, 1);
    word |= __shfl_xor_sync(kAllLanes, word, 2);
    return word;
}

// One orientation of a weight, and where the warp's tiles lie in it.
struct Orientation {
    uint8_t* const* buffers;  // by ScaleLayout
    int64_t rows;             // of the matrix
    int64_t tile_rows;
    int64_t tile_columns;
    int64_t tile_row;  // of the warp's first tile
    int64_t tile_column;
};

__device__ __forceinline__ void write_compact(const Orientation& at, const TileBytes& bytes) {
    const int64_t i = at.tile_row + lane_index() / 8;
    const int64_t j = at.tile_column + lane_index() % 8;
    if (j >= at.tile_columns) return;
    uint8_t* p = in_global(at.buffers[kCompact]) + i * at.tile_columns + j;
    if (i < at.tile_rows) p[0] = static_cast<uint8_t>(bytes.upper);
    if (i + 4 < at.tile_rows) p[4 * at.tile_columns] = static_cast<uint8_t>(bytes.lower);
}

// `upper` and `lower` are quad words: that of tile row i and columns [4 half, 4 half + 4) is in lane
// 8 (i % 4) + 4 half.
__device__ __forceinline__ void write_expanded(const Orientation& at, uint32_t upper, uint32_t lower) {
    const int64_t pitch = round_up(at.tile_columns, kAtomColumns);
    const int half = lane_index() % 2;
    const int64_t col = at.tile_column + half * kAtomColumns;
    int64_t row = at.tile_row * kBlock + lane_index() / 2;
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i, row += kBlock) {
        const uint32_t word = __shfl_sync(kAllLanes, i < 4 ? upper : lower, i % 4 * 8 + half * 4);
        const int count = col < pitch ? kAtomColumns : 0;
        store4(in_global(at.buffers[kExpanded]) + row * pitch + col, row < at.rows ? word : 0u, count);
    }
}

// Of both atoms a lane writes the 16 bytes of rows lane, lane + 32, lane + 64 and lane + 96.
__device__ __forceinline__ void write_swizzled(const Orientation& at, uint32_t upper, uint32_t lower) {
    const int64_t row = at.tile_row * kBlock + lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const int i = 2 * q + lane_index() / kBlock;
            const uint32_t word = __shfl_sync(kAllLanes, q < 2 ? upper : lower, i % 4 * 8 + half * 4);
            words[q] = row + 32 * q < at.rows ? word : 0u;
        }
        const int64_t col = at.tile_column + half * kAtomColumns;
        if (col < at.tile_columns) {
            store16(in_global(at.buffers[kSwizzled]) + swizzled_offset(row, col, at.tile_columns), words, 16);
        }
    }
}

__device__ __forceinline__ void write_scales(const Orientation& at, const TileBytes& bytes) {
    if (at.buffers[kCompact]) write_compact(at, bytes);
    if (!at.buffers[kExpanded] && !at.buffers[kSwizzled]) return;
    const uint32_t upper = quad_word(bytes.upper);
    const uint32_t lower = quad_word(bytes.lower);
    if (at.buffers[kExpanded]) write_expanded(at, upper, lower);
    if (at.buffers[kSwizzled]) write_swizzled(at, upper, lower);
}

__device__ __forceinline__ uint32_t tile_byte(const float* tiles, const Orientation& at, int64_t i, int64_t j,
                                              const TensorScale& tensor) {
    if (i >= at.tile_rows || j >= at.tile_columns) return 0u;
    return block_scale(tiles[i * at.tile_columns + j], tensor);
}

__device__ __forceinline__ void scale_unit(const CastTable& table, const WeightDescriptor& weight,
                                           int64_t local) {
    const float amax = group_amax(table, weight);
    const bool first = local == 0 && lane_index() == 0;
    if (table.skip_nonfinite && amax == kInf) {
        if (first && table.found_inf) *table.found_inf = 1.0f;
        return;
    }
    if (first && weight.amax) *weight.amax = amax;
    if (first && weight.columnwise_amax) *weight.columnwise_amax = amax;

    const int64_t tile_rows = ceil_div(weight.rows, kBlock);
    const int64_t tile_columns = ceil_div(weight.cols, kBlock);
    const int64_t units_per_row = ceil_div(tile_columns, kScaleTiles);
    const int64_t unit_row = local / units_per_row;
    const int64_t tile_row = unit_row * kScaleTiles;
    const int64_t tile_column = (local - unit_row * units_per_row) * kScaleTiles;
    const Orientation rowwise = {weight.rowwise_scale, weight.rows, tile_rows,
                                 tile_columns,         tile_row,    tile_column};
    const Orientation columnwise = {
        weight.columnwise_scale, weight.cols, tile_columns, tile_rows, tile_column, tile_row};

    const TensorScale tensor = tensor_scale(amax);
    const float* tiles = table.reduced + weight.tile_offset;
    const int64_t i = tile_row + lane_index() / 8;
    const int64_t j = tile_column + lane_index() % 8;
    const TileBytes bytes = {tile_byte(tiles, rowwise, i, j, tensor),
                             tile_byte(tiles, rowwise, i + 4, j, tensor)};
    write_scales(rowwise, bytes);
    write_scales(columnwise, transposed(bytes));
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kScaleBlocksPerSm)
    fused_scale_kernel(const __grid_constant__ CastTable table,
                       const __grid_constant__ WeightDescriptor single) {
    const int32_t status = header_status(table);
    if (status != kOk) {
        if (grid_warp() == 0 && lane_index() == 0 && table.status) *table.status = status;
        return;
    }
    ItemCursor<WeightDescriptor, &WeightDescriptor::scale_begin, kSingle> cursor(table.weights, table.count,
                                                                                 table.scale_units, single);
    for (int64_t unit = grid_warp(); unit < table.scale_units; unit += grid_warps()) {
        cursor.seek(unit);
        scale_unit(table, cursor.item(), unit - cursor.item().scale_begin);
    }
}

}  // namespace

void fused_scale(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    // A table without weights still reports the status.
    const auto kernel = table.count == 1 ? fused_scale_kernel<true> : fused_scale_kernel<false>;
    const WeightDescriptor single = table.count == 1 ? host[0] : WeightDescriptor{};
    launch("fused_scale", kernel, ceil_div(table.scale_units, kWarps), kScaleBlocksPerSm, stream, table,
           single);
}

}  // namespace zerofp4::cuda
