#pragma once
// Writing a square of scale bytes, 128 rows of a matrix by 8 scale columns (two swizzle atoms), in any
// layout.

#include "common/layout.h"
#include "common/table.h"
#include "cpu/bytes.h"

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

// Zero past the last row, even inside a tile, and past the last column.
ZEROFP4_HD void load_row(const ScaleSquare& square, int64_t r, uint8_t (&bytes)[kScaleTiles]) {
    std::memset(bytes, 0, sizeof bytes);
    const int64_t count = least(kScaleTiles, square.columns - square.column);
    if (square.row + r < square.rows) copy_bytes<kScaleTiles>(bytes, square.byte[r >> square.shift], count);
}

inline void write_expanded(const ScaleSquare& square, uint8_t* out) {
    const int64_t width = round_up(square.columns, kAtomColumns);
    const int64_t count = least(kScaleTiles, width - square.column);
    out += square.row * width + square.column;
    for (int64_t r = 0; r < kAtomRows; ++r, out += width) {
        uint8_t bytes[kScaleTiles];
        load_row(square, r, bytes);
        copy_bytes<kScaleTiles>(out, bytes, count);
    }
}

inline void write_swizzled(const ScaleSquare& square, uint8_t* out) {
    uint8_t atoms[2][kAtomBytes];
    for (int64_t r = 0; r < kAtomRows; ++r) {
        uint8_t bytes[kScaleTiles];
        load_row(square, r, bytes);
        std::memcpy(atoms[0] + swizzled_offset(r, 0, kAtomColumns), bytes, kAtomColumns);
        std::memcpy(atoms[1] + swizzled_offset(r, 0, kAtomColumns), bytes + kAtomColumns, kAtomColumns);
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
