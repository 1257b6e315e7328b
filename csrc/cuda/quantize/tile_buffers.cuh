#pragma once
// Quantizing a tile of 256 rows by 128 columns with a thread block: what its warps leave in shared memory for
// others, the columnwise codes and the scales of both orientations, and how the codes are written.

#include "common/layout.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

constexpr int kTileRows = 256;
constexpr int kTileCols = 128;
constexpr int kTileStrips = kTileRows / kBlock;
constexpr int kTileScaleColumns = kTileCols / kBlock;
constexpr int kColumnVectors = kTileRows / 2 / 16;  // of 16 bytes, in a row of the columnwise codes

// A tile without a columnwise copy leaves its scales alone.
template <bool kColumnwise>
struct TileBuffers {
    // [row][column block], or in tiles [strip][column block], for both orientations.
    alignas(16) uint8_t rowwise_scale[kTileRows][kTileScaleColumns];
};

template <>
struct TileBuffers<true> {
    // [column][8 rows to a word]. The vectors of a row change places, as in transpose.cu.
    alignas(16) uint32_t columnwise[kTileCols][kTileRows / 8];
    alignas(16) uint8_t rowwise_scale[kTileRows][kTileScaleColumns];
    // [strip][column]: a lane has those of four columns, which are one word.
    alignas(16) uint8_t columnwise_scale[kTileStrips][kTileCols];

    __device__ __forceinline__ uint32_t* column_vector(int column, int i) {
        return &columnwise[column][(i ^ (column / 4 % kColumnVectors)) * 4];
    }
    // The codes of 16 rows of a column.
    __device__ __forceinline__ void set_column(int column, int strip, const uint32_t (&codes)[2]) {
        uint32_t* p = column_vector(column, strip / 2) + strip % 2 * 2;
        *reinterpret_cast<uint2*>(p) = make_uint2(codes[0], codes[1]);
    }
    // The scales of the lane's columns, the first in the lowest byte.
    __device__ __forceinline__ void set_columnwise_scales(int strip, uint32_t four) {
        reinterpret_cast<uint32_t*>(columnwise_scale[strip])[lane_index()] = four;
    }
};

// Rows of `pitch` bytes that begin at `data`, of which this tile has [row, ...) and bytes [byte, ...).
__device__ __forceinline__ void write_columnwise(TileBuffers<true>& tile, uint8_t* data, int64_t rows,
                                                 int64_t pitch, int64_t row, int64_t byte) {
    constexpr int kRowsPerPass = kThreads / kColumnVectors;
    static_assert(kRowsPerPass / 4 % kColumnVectors == 0, "vectors have the same places in every pass");
    const int i = static_cast<int>(threadIdx.x) % kColumnVectors;
    const int first = static_cast<int>(threadIdx.x) / kColumnVectors;
    const uint32_t* from = tile.column_vector(first, i);
    uint8_t* to = data + (row + first) * pitch + byte + 16 * i;
    const int count = clamp_count(pitch - byte - 16 * i, 16);
    if (count == 16 && row + kTileCols <= rows && pitch % 16 == 0 && is_aligned(data, 16)) {
#pragma unroll
        for (int pass = 0; pass < kTileCols / kRowsPerPass; ++pass, to += kRowsPerPass * pitch) {
            const uint32_t* words = from + pass * kRowsPerPass * (kTileRows / 8);
            __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(words));
        }
        return;
    }
#pragma unroll 1
    for (int column = first; column < min(rows - row, int64_t{kTileCols}); column += kRowsPerPass) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        store16(to, {x.x, x.y, x.z, x.w}, count);
        from += kRowsPerPass * (kTileRows / 8);
        to += kRowsPerPass * pitch;
    }
}

}  // namespace zerofp4::cuda
