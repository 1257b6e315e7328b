#pragma once
// Changing the layout of the scales of a list of matrices.

#include "common/args/list.h"
#include "common/layout.h"

namespace zerofp4 {

// Compact scales of a matrix to a padded layout, padding zeroed; or back.
struct ScaleLayoutDescriptor {
    const uint8_t* input;
    uint8_t* output;
    int64_t rows;        // of the matrix
    int64_t columns;     // of its scales
    int32_t shift;       // 4 where 16 rows of the matrix share a compact row, else 0
    ScaleLayout layout;  // of the padded side: kExpanded or kSwizzled
    int32_t aligned;     // 16 bytes of a compact row lie at multiples of 16, and so do the buffers
    int32_t padding;
    int64_t unit_begin;
};

using ScaleLayoutTable = ItemTable<ScaleLayoutDescriptor>;

constexpr int kLayoutRows = kAtomRows;  // of a unit
constexpr int kLayoutColumns = 128;     // of a unit, of scales

}  // namespace zerofp4
