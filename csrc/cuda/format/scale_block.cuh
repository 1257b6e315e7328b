#pragma once
// Writing the scales of one block or of four beside each other, in any layout, with one lane.

#include "common/layout.h"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// Of tile j of row i of a matrix of so many rows and scale columns; 0 past the edges, up to where the padding
// ends. `scales` is by ScaleLayout.
__device__ __forceinline__ void write_scale(int64_t rows, int64_t columns, int64_t i, int64_t j,
                                            uint32_t scale, uint8_t* const* scales) {
    const int64_t pitch = round_up(columns, kAtomColumns);
    const bool exists = i < rows && j < columns;
    const uint8_t byte = exists ? static_cast<uint8_t>(scale) : 0;
    if (scales[kCompact] && exists && i % kBlock == 0) scales[kCompact][i / kBlock * columns + j] = byte;
    if (i >= round_up(rows, kAtomRows) || j >= pitch) return;
    if (scales[kExpanded]) scales[kExpanded][i * pitch + j] = byte;
    if (scales[kSwizzled]) scales[kSwizzled][swizzled_offset(i, j, columns)] = byte;
}

// Of blocks j to j + 3 of row i, where j is a multiple of 4: the first `count` of them exist and are in
// `four`, the first in the lowest byte, whose others are 0. 16 rows may share a block (tiles); row i is one
// of the padding at most.
__device__ __forceinline__ void write_four_scales(int64_t columns, bool tiles, int64_t i, int64_t j,
                                                  int count, uint32_t four, uint8_t* const* scales) {
    if (scales[kCompact] && count > 0 && (!tiles || i % kBlock == 0))
        store4(scales[kCompact] + (tiles ? i / kBlock : i) * columns + j, four, count);
    const int64_t pitch = round_up(columns, kAtomColumns);
    if (j >= pitch) return;
    if (scales[kExpanded]) store4(scales[kExpanded] + i * pitch + j, four, kAtomColumns);
    if (scales[kSwizzled]) store4(scales[kSwizzled] + swizzled_offset(i, j, columns), four, kAtomColumns);
}

}  // namespace zerofp4::cuda
