// Block scales of every tile from the reduced amaxes, in each layout and orientation that has a buffer. A
// lane takes a square of 8 x 8 tiles, whose transposition stays in its registers; a warp's squares lie 4
// below and 8 beside one another where the weight is that large, so that neighbouring lanes write
// neighbouring bytes of both orientations.

#include "common/args/cast.h"
#include "common/scale.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kScaleBlocksPerSm = 2;
constexpr int kBandSquares = 4;  // squares below one another
static_assert(kWarpSquares == kLanes && kScaleTiles * kBlock == kAtomRows && kScaleTiles == 2 * kAtomColumns);

// Scale bytes of a square, 0 outside of the weight: word [i][h] has those of the tiles (i, 4h) to (i, 4h +
// 3).
using SquareBytes = uint32_t[kScaleTiles][2];

// One orientation of a weight, and where the lane's square lies in it.
struct Orientation {
    uint8_t* const* buffers;  // by ScaleLayout
    int64_t rows;             // of the matrix
    int64_t tile_rows;
    int64_t tile_columns;
    int64_t
        tile_row;  // of the square's first tile; this or the column past the last where there is no square
    int64_t tile_column;
};

// a, b, c and d are rows of a 4 x 4 matrix of bytes.
__device__ __forceinline__ void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410), b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410), d = __byte_perm(ab_high, cd_high, 0x7632);
}

__device__ __forceinline__ void transpose_square(SquareBytes& bytes) {
#pragma unroll
    for (int i = 0; i < kScaleTiles; i += 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            transpose_bytes(bytes[i][h], bytes[i + 1][h], bytes[i + 2][h], bytes[i + 3][h]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t upper_right = bytes[i][1];
        bytes[i][1] = bytes[i + 4][0];
        bytes[i + 4][0] = upper_right;
    }
}

__device__ __forceinline__ void write_compact(const Orientation& at, const SquareBytes& bytes) {
    const int rows = clamp_count(at.tile_rows - at.tile_row, kScaleTiles);
    const int columns = clamp_count(at.tile_columns - at.tile_column, kScaleTiles);
    uint8_t* p = in_global(at.buffers[kCompact]) + at.tile_row * at.tile_columns + at.tile_column;
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i) {
        if (i < rows) store8(p + i * at.tile_columns, bytes[i], columns);
    }
}

__device__ __forceinline__ void write_expanded(const Orientation& at, const SquareBytes& bytes) {
    if (at.tile_row >= at.tile_rows) return;
    const int64_t pitch = round_up(at.tile_columns, kAtomColumns);
    const int columns = clamp_count(pitch - at.tile_column, kScaleTiles);
    int64_t row = at.tile_row * kBlock;
    uint8_t* p = in_global(at.buffers[kExpanded]) + row * pitch + at.tile_column;
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i) {
#pragma unroll 1
        for (int r = 0; r < kBlock; ++r, ++row, p += pitch) {
            const bool exists = row < at.rows;
            store8(p, {exists ? bytes[i][0] : 0u, exists ? bytes[i][1] : 0u}, columns);
        }
    }
}

// A square is two atoms. In each, 16 bytes belong to the rows r, r + 32, r + 64 and r + 96, which lie in tile
// rows 2 apart. The warp writes the atoms of one lane after the other.
__device__ __forceinline__ void write_swizzled(const Orientation& at, const SquareBytes& bytes) {
    const bool odd = lane_index() >= kBlock;
#pragma unroll 1
    for (int source = 0; source < kLanes; ++source) {
        const int64_t tile_row = __shfl_sync(kAllLanes, at.tile_row, source);
        const int64_t tile_column = __shfl_sync(kAllLanes, at.tile_column, source);
        if (tile_row >= at.tile_rows) continue;
        const int64_t row = tile_row * kBlock + lane_index();
        uint8_t* p = in_global(at.buffers[kSwizzled]) + swizzled_offset(row, tile_column, at.tile_columns);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t words[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const uint32_t upper = __shfl_sync(kAllLanes, bytes[2 * q][h], source);
                const uint32_t lower = __shfl_sync(kAllLanes, bytes[2 * q + 1][h], source);
                words[q] = row + 32 * q >= at.rows ? 0u : odd ? lower : upper;
            }
            if (tile_column + h * kAtomColumns < at.tile_columns) store16(p + h * kAtomBytes, words, 16);
        }
    }
}

__device__ __forceinline__ void write_scales(const Orientation& at, const SquareBytes& bytes) {
    if (at.buffers[kCompact]) write_compact(at, bytes);
    if (at.buffers[kExpanded]) write_expanded(at, bytes);
    if (at.buffers[kSwizzled]) write_swizzled(at, bytes);
}

__device__ __forceinline__ void load_square(const float* tiles, const Orientation& at,
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

// Where square `index` of a weight is, in bands of kBandSquares rows: a band's squares are counted column by
// column. What lies past the last square is below the last row or right of the last column.
__device__ __forceinline__ void place_square(Orientation& at, uint32_t index) {
    const uint32_t down = static_cast<uint32_t>(ceil_div(at.tile_rows, kScaleTiles));
    const uint32_t across = static_cast<uint32_t>(ceil_div(at.tile_columns, kScaleTiles));
    const uint32_t band = index / (kBandSquares * across) * kBandSquares;
    const uint32_t height = band < down ? min(down - band, kBandSquares) : 1u;
    const uint32_t local = index - band * across;
    at.tile_column = static_cast<int64_t>(local / height) * kScaleTiles;
    at.tile_row = static_cast<int64_t>(band + local % height) * kScaleTiles;
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

    const int64_t tile_rows = ceil_div(weight.rows, kBlock);
    const int64_t tile_columns = ceil_div(weight.cols, kBlock);
    Orientation rowwise = {weight.rowwise_scale, weight.rows, tile_rows, tile_columns, 0, 0};
    place_square(rowwise, static_cast<uint32_t>(local * kWarpSquares + lane_index()));
    SquareBytes bytes;
    load_square(table.reduced + weight.tile_offset, rowwise, tensor_scale(amax), bytes);
    write_scales(rowwise, bytes);
    transpose_square(bytes);
    // A lane without a square has no column either.
    const int64_t row = rowwise.tile_row < tile_rows ? rowwise.tile_column : tile_columns;
    write_scales({weight.columnwise_scale, weight.cols, tile_columns, tile_rows, row, rowwise.tile_row},
                 bytes);
}

template <bool kSingle>
__global__ void __launch_bounds__(kThreads, kScaleBlocksPerSm)
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
        table.weights, table.count, table.scale_units, table.scale_items, single);
    for (int64_t unit = share.begin + warp_index(); unit < share.end; unit += kWarps) {
        cursor.seek(unit);
        scale_unit(table, cursor.item(), unit - cursor.item().scale_begin);
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

}  // namespace zerofp4::cuda
