#pragma once
// Writing the scale of one block, in any layout, with one lane.

#include "common/layout.h"

namespace zerofp4::cuda {

// Of block j of row i of a matrix of so many rows and scale columns, where 16 rows may share a block (tiles);
// 0 past the edges, up to where the padding ends. `scales` is by ScaleLayout.
__device__ __forceinline__ void write_scale(int64_t rows, int64_t columns, bool tiles, int64_t i, int64_t j,
                                            uint32_t scale, uint8_t* const* scales) {
    const int64_t pitch = round_up(columns, kAtomColumns);
    const bool exists = i < rows && j < columns;
    const uint8_t byte = exists ? static_cast<uint8_t>(scale) : 0;
    if (scales[kCompact] && exists && (!tiles || i % kBlock == 0))
        scales[kCompact][(tiles ? i / kBlock : i) * columns + j] = byte;
    if (i >= round_up(rows, kAtomRows) || j >= pitch) return;
    if (scales[kExpanded]) scales[kExpanded][i * pitch + j] = byte;
    if (scales[kSwizzled]) scales[kSwizzled][swizzled_offset(i, j, columns)] = byte;
}

}  // namespace zerofp4::cuda
