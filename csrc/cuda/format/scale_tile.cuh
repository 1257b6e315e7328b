#pragma once
// Writing the scales of a tile, which are in shared memory, in any layout, with a thread block.

#include "common/layout.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/format/nibbles.cuh"

namespace zerofp4::cuda {

// Where the scales of one orientation go, by ScaleLayout; null where there is no buffer.
struct ScaleBuffers {
    uint8_t* of[kScaleLayouts];
};

// The scales of one orientation: where the tile lies in the matrix [rows, 16 * columns] and its bytes, with
// kTransposed those of the other orientation. The thread block writes them beginning with thread kFirst, so
// that one orientation's can go to other warps than the other's.
template <int kRows, int kColumns, int kFirst, bool kTransposed>
struct ScaleTile {
    const uint8_t* bytes;
    int pitch;        // of a row of them; a multiple of 4
    int64_t rows;     // of the matrix
    int64_t columns;  // scale columns
    int64_t row;      // of the tile's first
    int64_t column;
    int shift;  // 4 where a byte stands for 16 rows, else 0

    // Those of row r in columns c to c + 3; c is a multiple of 4.
    __device__ __forceinline__ uint32_t word(int r, int c) const {
        const int i = r >> shift;
        if constexpr (!kTransposed) return load(i, c);
        // Byte i % 4 of four words, of which the lanes of a warp load neighbouring ones.
        const uint32_t selector = 0x40u + 0x11u * (i % 4);
        return __byte_perm(permute(load(c, i & ~3), load(c + 1, i & ~3), selector),
                           permute(load(c + 2, i & ~3), load(c + 3, i & ~3), selector), 0x5410);
    }
    __device__ __forceinline__ uint32_t load(int row, int column) const {
        return *reinterpret_cast<const uint32_t*>(bytes + row * pitch + column);
    }
    __device__ __forceinline__ int thread() const {
        return (static_cast<int>(threadIdx.x) + kThreads - kFirst) % kThreads;
    }
};

// Compact scales (shift as in the tile) or expanded ones (every row, zeros up to padded_rows).
template <int kRows, int kColumns, int kFirst, bool kTransposed>
__device__ __forceinline__ void write_scale_rows(const ScaleTile<kRows, kColumns, kFirst, kTransposed>& tile,
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
template <int kRows, int kColumns, int kFirst, bool kTransposed>
__device__ __forceinline__ void write_scale_atoms(const ScaleTile<kRows, kColumns, kFirst, kTransposed>& tile,
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

// Not inlined: kernels whose code is short fetch it faster.
template <int kRows, int kColumns, int kFirst, bool kTransposed>
__device__ __noinline__ void write_padded_scales(ScaleTile<kRows, kColumns, kFirst, kTransposed> tile,
                                                 uint8_t* expanded, uint8_t* swizzled) {
    if (expanded) write_scale_rows(tile, expanded, true);
    if (swizzled) write_scale_atoms(tile, swizzled);
}

template <int kRows, int kColumns, int kFirst, bool kTransposed>
__device__ __forceinline__ void write_scales(const ScaleTile<kRows, kColumns, kFirst, kTransposed>& tile,
                                             uint8_t* const (&buffers)[kScaleLayouts]) {
    if (buffers[kCompact]) write_scale_rows(tile, buffers[kCompact], false);
    if (buffers[kExpanded] || buffers[kSwizzled])
        write_padded_scales(tile, buffers[kExpanded], buffers[kSwizzled]);
}

}  // namespace zerofp4::cuda
