#pragma once
// Writing the scales of squares of 8 x 8 tiles, each in the registers of a lane, in any layout, with a warp.

#include "common/layout.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {

static_assert(kScaleTiles * kBlock == kAtomRows && kScaleTiles == 2 * kAtomColumns);

// Scale bytes of a square, 0 outside of the weight: word [i][h] has those of the tiles (i, 4 h) and the three
// after it.
using SquareBytes = uint32_t[kScaleTiles][2];

// One orientation of a weight, and where the lane's square lies in it.
struct ScaleSquare {
    uint8_t* const* buffers;  // by ScaleLayout
    int64_t rows;             // of the matrix
    int64_t tile_rows;
    int64_t tile_columns;
    // Of the square's first tile; one of them is past the last where there is no square.
    int64_t tile_row;
    int64_t tile_column;
};

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

__device__ __forceinline__ void write_compact(const ScaleSquare& at, const SquareBytes& bytes) {
    const int rows = clamp_count(at.tile_rows - at.tile_row, kScaleTiles);
    const int columns = clamp_count(at.tile_columns - at.tile_column, kScaleTiles);
    uint8_t* p = in_global(at.buffers[kCompact]) + at.tile_row * at.tile_columns + at.tile_column;
#pragma unroll
    for (int i = 0; i < kScaleTiles; ++i) {
        if (i < rows) store8(p + i * at.tile_columns, bytes[i], columns);
    }
}

__device__ __forceinline__ void write_expanded(const ScaleSquare& at, const SquareBytes& bytes) {
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
__device__ __forceinline__ void write_swizzled(const ScaleSquare& at, const SquareBytes& bytes) {
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

__device__ __forceinline__ void write_scales(const ScaleSquare& at, const SquareBytes& bytes) {
    if (at.buffers[kCompact]) write_compact(at, bytes);
    if (at.buffers[kExpanded]) write_expanded(at, bytes);
    if (at.buffers[kSwizzled]) write_swizzled(at, bytes);
}

}  // namespace zerofp4::cuda
