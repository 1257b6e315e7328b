#pragma once
// Writing a square of scale bytes, 128 rows of a matrix by 8 scale columns (two swizzle atoms), in any
// layout.

#include "common/layout.h"
#include "cpu/device/bytes.h"

namespace zerofp4::cpu::ZEROFP4_ISA {

struct ScaleSquare {
    const uint8_t (*byte)[kScaleTiles];  // of the square's row r: byte[r >> shift]
    int shift;                           // 4 where a byte stands for 16 rows, else 0
    int64_t row, rows;                   // of the square's first row; of the matrix
    int64_t column, columns;             // the same of scale columns
};

inline void write_compact(const ScaleSquare& square, uint8_t* out) {
    const int64_t first = square.row >> square.shift,
                  count = least(kScaleTiles, square.columns - square.column);
    const int64_t existing = ceil_div(square.rows, int64_t{1} << square.shift) - first;
    out += first * square.columns + square.column;
    for (int64_t i = 0; i < least(kAtomRows >> square.shift, existing); ++i, out += square.columns) {
        copy_bytes<kScaleTiles>(out, square.byte[i], count);
    }
}

// The bytes of one row.
using ScaleRow = uint64_t;
static_assert(sizeof(ScaleRow) == kScaleTiles, "a row is one number, its first byte the lowest");

// Ones where there is a column; a square begins inside of its matrix, so that there is one at least.
ZEROFP4_HD ScaleRow existing_columns(const ScaleSquare& square) {
    const int64_t count = least(kScaleTiles, square.columns - square.column);
    return ~ScaleRow{0} >> (kScaleTiles - count) * 8;
}

// Zero past the last row, even inside a tile, and past the last column.
ZEROFP4_HD ScaleRow load_row(const ScaleSquare& square, int64_t r, ScaleRow existing) {
    ScaleRow row;
    std::memcpy(&row, square.byte[r >> square.shift], sizeof row);
    return square.row + r < square.rows ? row & existing : 0;
}

inline void write_expanded(const ScaleSquare& square, uint8_t* out) {
    const int64_t width = round_up(square.columns, kAtomColumns);
    const int64_t count = least(kScaleTiles, width - square.column);
    const ScaleRow existing = existing_columns(square);
    out += square.row * width + square.column;
    for (int64_t r = 0; r < kAtomRows; ++r, out += width) {
        const ScaleRow row = load_row(square, r, existing);
        copy_bytes<kScaleTiles>(out, &row, count);
    }
}

inline void write_swizzled(const ScaleSquare& square, uint8_t* out) {
    uint8_t atoms[2][kAtomBytes];
    const ScaleRow existing = existing_columns(square);
    for (int64_t r = 0; r < kAtomRows; ++r) {
        const ScaleRow row = load_row(square, r, existing), right = row >> 32;
        std::memcpy(atoms[0] + swizzled_offset(r, 0, kAtomColumns), &row, kAtomColumns);
        std::memcpy(atoms[1] + swizzled_offset(r, 0, kAtomColumns), &right, kAtomColumns);
    }
    const bool both = square.column + kAtomColumns < square.columns;
    copy_short<2 * kAtomBytes>(out + swizzled_offset(square.row, square.column, square.columns), atoms,
                               both ? 2 * kAtomBytes : kAtomBytes);
}

inline void write_layouts(const ScaleSquare& square, uint8_t* const (&scale)[kScaleLayouts]) {
    if (scale[kCompact]) write_compact(square, scale[kCompact]);
    if (scale[kExpanded]) write_expanded(square, scale[kExpanded]);
    if (scale[kSwizzled]) write_swizzled(square, scale[kSwizzled]);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
