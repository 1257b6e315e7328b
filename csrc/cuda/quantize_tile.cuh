#pragma once
// Quantizing a tile of 256 rows by 128 columns with a thread block: what its warps leave in shared memory for
// others, the columnwise codes and the scales of both orientations, and how that is written.

#include "common/layout.h"
#include "cuda/units.cuh"
#include "cuda/vector.cuh"

namespace zerofp4::cuda {

constexpr int kTileRows = 256;
constexpr int kTileCols = 128;
constexpr int kTileStrips = kTileRows / kBlock;
constexpr int kTileScaleColumns = kTileCols / kBlock;
constexpr int kColumnVectors = kTileRows / 2 / 16;  // of 16 bytes, in a row of the columnwise codes

struct TileBuffers {
    // [column][8 rows to a word]. The vectors of a row change places, as in transpose.cu.
    alignas(16) uint32_t columnwise[kTileCols][kTileRows / 8];
    // 1x16 blocks: of row r and column block c, [r][c]; of column c and row block r, [c][r]. Tiles: rows of
    // tiles in place of rows, and the same of the transpose.
    alignas(16) uint8_t rowwise_scale[kTileRows][kTileScaleColumns];
    alignas(16) uint8_t columnwise_scale[kTileCols][kTileStrips];

    __device__ __forceinline__ uint32_t* column_vector(int column, int i) {
        return &columnwise[column][(i ^ (column / 4 % kColumnVectors)) * 4];
    }
    // The codes of 16 rows of a column.
    __device__ __forceinline__ void set_column(int column, int strip, uint32_t first, uint32_t second) {
        uint32_t* p = column_vector(column, strip / 2) + strip % 2 * 2;
        *reinterpret_cast<uint2*>(p) = make_uint2(first, second);
    }
};

// Rows of `pitch` bytes that begin at `data`, of which this tile has [row, ...) and bytes [byte, ...).
__device__ __forceinline__ void write_columnwise(TileBuffers& tile, uint8_t* data, int64_t rows,
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

// The scales of one orientation: where the tile lies in the matrix [rows, 16 * columns] and its bytes. The
// thread block writes them beginning with thread kFirst, so that one orientation's can go to other warps than
// the other's.
template <int kRows, int kColumns, int kFirst>
struct ScaleTile {
    const uint8_t (*bytes)[kColumns];
    int64_t rows;     // of the matrix
    int64_t columns;  // scale columns
    int64_t row;      // of the tile's first
    int64_t column;
    int shift;  // 4 where a byte stands for 16 rows, else 0

    __device__ __forceinline__ uint32_t word(int r, int c) const {
        return *reinterpret_cast<const uint32_t*>(&bytes[r >> shift][c]);
    }
    __device__ __forceinline__ int thread() const {
        return (static_cast<int>(threadIdx.x) + kThreads - kFirst) % kThreads;
    }
};

// Compact scales (shift as in the tile) or expanded ones (every row, zeros up to padded_rows).
template <int kRows, int kColumns, int kFirst>
__device__ __forceinline__ void write_scale_rows(const ScaleTile<kRows, kColumns, kFirst>& tile,
                                                 uint8_t* scale, bool expanded) {
    const int shift = expanded ? 0 : tile.shift;
    const int64_t pitch = expanded ? round_up(tile.columns, kAtomColumns) : tile.columns;
    const int64_t existing = ceil_div(tile.rows, int64_t{1} << shift);
    const int64_t rows = expanded ? round_up(tile.rows, kAtomRows) : existing;
    const int count = clamp_count(pitch - tile.column, kColumns);
    for (int r = tile.thread(); r < kRows >> shift; r += kThreads) {
        const int64_t row = (tile.row >> shift) + r;
        if (row >= rows) break;
        uint8_t* p = scale + row * pitch + tile.column;
        const int at = shift == tile.shift ? r << shift : r;
        uint32_t words[kColumns / 4];
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) words[i] = row < existing ? tile.word(at, 4 * i) : 0u;
        if constexpr (kColumns == 16) {
            store16(p, words, count);
        } else {
            store8(p, words, count);
        }
    }
}

// Atom by atom, 16 bytes a thread.
template <int kRows, int kColumns, int kFirst>
__device__ __forceinline__ void write_scale_atoms(const ScaleTile<kRows, kColumns, kFirst>& tile,
                                                  uint8_t* scale) {
    constexpr int kAtomsAcross = kColumns / kAtomColumns;
    constexpr int kVectors = kRows / kAtomRows * kAtomsAcross * kLanes;
    for (int i = tile.thread(); i < kVectors; i += kThreads) {
        const int atom = i / kLanes, r = atom / kAtomsAcross * kAtomRows + i % kLanes;
        const int c = atom % kAtomsAcross * kAtomColumns;
        const int64_t row = tile.row + r, column = tile.column + c;
        if (tile.row + atom / kAtomsAcross * kAtomRows >= tile.rows || column >= tile.columns) continue;
        uint32_t words[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) words[q] = row + 32 * q < tile.rows ? tile.word(r + 32 * q, c) : 0u;
        store16(scale + swizzled_offset(row, column, tile.columns), words, 16);
    }
}

template <int kRows, int kColumns, int kFirst>
__device__ __forceinline__ void write_scales(const ScaleTile<kRows, kColumns, kFirst>& tile,
                                             uint8_t* const (&buffers)[kScaleLayouts]) {
    if (buffers[kCompact]) write_scale_rows(tile, buffers[kCompact], false);
    if (buffers[kExpanded]) write_scale_rows(tile, buffers[kExpanded], true);
    if (buffers[kSwizzled]) write_scale_atoms(tile, buffers[kSwizzled]);
}

}  // namespace zerofp4::cuda
