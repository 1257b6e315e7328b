#pragma once
// Where things lie: tiles, packed codes and the padded scale layouts.

#include "common/bits.h"

namespace zerofp4 {

constexpr int kBlock = 16;       // elements of a scaling block; a 2D block is kBlock x kBlock
constexpr int kAtomRows = 128;   // rows of an expanded scale that one swizzle atom covers
constexpr int kAtomColumns = 4;  // scale columns of an atom
constexpr int kAtomBytes = 512;

constexpr int kStripColumns = 128;  // matrices are read in strips of 16 rows by 128 columns
constexpr int kScaleTiles = 8;      // scales are made in squares of 8 x 8 tiles: two whole swizzle atoms in
                                    // either orientation

enum ScaleLayout : int { kCompact = 0, kExpanded = 1, kSwizzled = 2, kScaleLayouts = 3 };

// Byte of expanded element (i, j) in the swizzled layout of a matrix with `columns` scale columns.
ZEROFP4_HD int64_t swizzled_offset(int64_t i, int64_t j, int64_t columns) {
    const int64_t atoms_per_row = ceil_div(columns, kAtomColumns);
    return (i / 128 * atoms_per_row + j / 4) * kAtomBytes + (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4;
}

}  // namespace zerofp4
