// Block scales of every tile from the reduced amaxes, in each layout and orientation that has a buffer; or,
// where the compact rowwise ones are there, from these. A lane takes a square of 8 x 8 tiles, whose
// transposition stays in its registers; a warp's squares lie 4 below and 8 beside one another where the
// weight is that large, so that neighbouring lanes write neighbouring bytes of both orientations.

#include "common/args/cast.h"
#include "common/scale.h"
#include "cuda/device/tuning.cuh"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/format/scale_square.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kBandSquares = 4;  // squares below one another
static_assert(kWarpSquares == kLanes);

__device__ __forceinline__ void load_square(const float* tiles, const ScaleSquare& at,
                                            const TensorScale& tensor, SquareBytes& bytes) {
    const int rows = clamp_count(at.tile_rows - at.tile_row, kScaleTiles);
    const int columns = clamp_count(at.tile_columns - at.tile_column, kScaleTiles);
    const float* p = in_global(tiles) + at.tile_row * at.tile_columns + at.tile_column;
    float amaxes[kScaleTiles][kScaleTiles];
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i) {
        const int count = i < rows ? columns : 0;
        load_elements(p + i * at.tile_columns, count, amaxes[i]);
    }
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            bytes[i][h] = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) bytes[i][h] |= block_scale(amaxes[i][4 * h + j], tensor) << (8 * j);
        }
    }
}

// The same from compact scales.
__device__ __forceinline__ void load_square(const uint8_t* scales, const ScaleSquare& at,
                                            SquareBytes& bytes) {
    const int rows = clamp_count(at.tile_rows - at.tile_row, kScaleTiles);
    const int columns = clamp_count(at.tile_columns - at.tile_column, kScaleTiles);
    const uint8_t* p = in_global(scales) + at.tile_row * at.tile_columns + at.tile_column;
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i, p += at.tile_columns) {
#pragma unroll
        for (int h = 0; h < 2; ++h) bytes[i][h] = load4(p + 4 * h, i < rows ? columns - 4 * h : 0);
    }
}

// Where square `index` of a weight is, in bands of kBandSquares rows: a band's squares are counted column by
// column. What lies past the last square is below the last row or right of the last column.
__device__ __forceinline__ void place_square(ScaleSquare& at, uint32_t index) {
    const uint32_t down = static_cast<uint32_t>(ceil_div(at.tile_rows, kScaleTiles));
    const uint32_t across = static_cast<uint32_t>(ceil_div(at.tile_columns, kScaleTiles));
    const uint32_t band = index / (kBandSquares * across) * kBandSquares;
    const uint32_t height = band < down ? min(down - band, kBandSquares) : 1u;
    const uint32_t local = index - band * across;
    at.tile_column = static_cast<int64_t>(local / height) * kScaleTiles;
    at.tile_row = static_cast<int64_t>(band + local % height) * kScaleTiles;
}

// The square of this lane in a unit; make(square, bytes) gives its scales.
template <typename Make>
__device__ __forceinline__ void write_unit(const WeightDescriptor& weight, int64_t local, const Make& make) {
    const int64_t tile_rows = ceil_div(weight.rows, kBlock);
    const int64_t tile_columns = ceil_div(weight.cols, kBlock);
    ScaleSquare rowwise = {weight.rowwise_scale, weight.rows, tile_rows, tile_columns, 0, 0};
    place_square(rowwise, static_cast<uint32_t>(local * kWarpSquares + lane_index()));
    SquareBytes bytes;
    make(rowwise, bytes);
    write_scales(rowwise, bytes);
    transpose_square(bytes);
    // A lane without a square has no column either.
    const int64_t row = rowwise.tile_row < tile_rows ? rowwise.tile_column : tile_columns;
    write_scales({weight.columnwise_scale, weight.cols, tile_columns, tile_rows, row, rowwise.tile_row},
                 bytes);
}

__device__ __forceinline__ void scale_unit(const CastTable& table, const WeightDescriptor& weight,
                                           int64_t local) {
    const float amax = group_amax(table, weight);
    const bool first = local == 0 && lane_index() == 0;
    if (is_skipped(amax)) {
        if (first && table.found_inf) *table.found_inf = 1.0f;
        return;
    }
    if (first && weight.amax) *weight.amax = amax;
    if (first && weight.columnwise_amax) *weight.columnwise_amax = amax;
    if (weight.tile_offset < 0) return;  // the cast makes its scales
    const float* tiles = table.reduced + weight.tile_offset;
    const TensorScale tensor = tensor_scale(amax);
    write_unit(weight, local,
               [&](const ScaleSquare& at, SquareBytes& bytes) { load_square(tiles, at, tensor, bytes); });
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kTuning.scale_blocks)
    fused_scale_kernel(const __grid_constant__ CastTable table,
                       const __grid_constant__ WeightDescriptor single) {
    wait_for_previous_kernel();
    const int32_t status = header_status(table);
    if (status != kOk) {
        if (grid_warp() == 0 && lane_index() == 0 && table.status) *table.status = status;
        return;
    }
    const Share share = block_share<kBlockScales>(table.scale_units);
    if (share.begin >= share.end) return;  // a table without units has a block for the status only
    ItemCursor<WeightDescriptor, &WeightDescriptor::scale_begin, kSingle> cursor(
        table.weights, table.count, table.scale_units, table.scale_items + blockIdx.x, single);
    for (int64_t unit = share.begin + warp_index(); unit < share.end; unit += kWarps) {
        cursor.seek(unit);
        scale_unit(table, cursor.item(), unit - cursor.item().scale_begin);
    }
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kTuning.scale_blocks)
    spread_scales_kernel(const __grid_constant__ CastTable table,
                         const __grid_constant__ WeightDescriptor single) {
    wait_for_previous_kernel();
    const Share share = block_share<kBlockScales>(table.scale_units);
    ItemCursor<WeightDescriptor, &WeightDescriptor::scale_begin, kSingle> cursor(
        table.weights, table.count, table.scale_units, table.scale_items + blockIdx.x, single);
    for (int64_t unit = share.begin + warp_index(); unit < share.end; unit += kWarps) {
        cursor.seek(unit);
        const WeightDescriptor& weight = cursor.item();
        write_unit(weight, unit - weight.scale_begin, [&](const ScaleSquare& at, SquareBytes& bytes) {
            load_square(weight.rowwise_scale[kCompact], at, bytes);
        });
    }
}

}  // namespace

void fused_scale(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    // A table without weights still reports the status.
    const auto kernel = table.count == 1 ? fused_scale_kernel<true> : fused_scale_kernel<false>;
    const WeightDescriptor single = table.count == 1 ? host[0] : WeightDescriptor{};
    const int64_t blocks = ceil_div(table.scale_units, kBlockScales);
    launch("fused_scale", kernel, blocks > 0 ? blocks : 1, stream, table, single);
}

void spread_scales(const CastTable& table, const WeightDescriptor* host, cudaStream_t stream) {
    const auto kernel = table.count == 1 ? spread_scales_kernel<true> : spread_scales_kernel<false>;
    launch("spread_scales", kernel, ceil_div(table.scale_units, kBlockScales), stream, table, host[0]);
}

}  // namespace zerofp4::cuda
