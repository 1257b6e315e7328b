#pragma once
// Quantizing one matrix to MXFP8, and dequantizing a list of them.

#include "common/args/dequantize.h"
#include "common/mxfp8.h"

namespace zerofp4 {

struct Mxfp8Args {
    const void* input;  // [rows, cols] of `dtype`, contiguous
    DType dtype;
    int64_t rows;
    int64_t cols;
    const float* skip;             // float[1]: nothing is written where it is not 0; or null
    uint8_t* rowwise_data;         // [rows, cols], or null with both of its scales
    uint8_t* rowwise_scale;        // [rows, ceil(cols / 32)]
    uint8_t* rowwise_swizzled;     // [round_up(rows, 128), round_up(ceil(cols / 32), 4)], or null
    uint8_t* columnwise_data;      // [rows, cols], or null with both of its scales
    uint8_t* columnwise_scale;     // [ceil(rows / 32), cols]
    uint8_t* columnwise_swizzled;  // [round_up(cols, 128), round_up(ceil(rows / 32), 4)], or null
};

// Swizzled scales have padding, which is written too: then the matrix is walked as if it were padded to whole
// atoms in both directions. What does not exist counts as 0, and its scales are 0.
ZEROFP4_HD int64_t walked(const Mxfp8Args& args, int64_t size) {
    const bool padded = args.rowwise_swizzled != nullptr || args.columnwise_swizzled != nullptr;
    return padded ? round_up(size, kAtomRows) : size;
}
static_assert(kAtomRows == kAtomColumns * kMxfp8Block, "an atom covers 128 x 128 elements");

// One copy of a matrix in MXFP8, and where its values go.
struct Mxfp8DequantizeDescriptor {
    const uint8_t* data;   // [rows, cols]
    const uint8_t* scale;  // compact or swizzled, as in Mxfp8Args
    void* output;          // [rows, cols]
    int64_t rows;
    int64_t cols;
    int32_t columnwise;
    int32_t swizzled;
    int32_t aligned;  // whole vectors of a lane of the CUDA kernel lie at multiples of their size
    uint32_t across;  // pieces side by side
    int64_t unit_begin;
};

using Mxfp8DequantizeTable = ItemTable<Mxfp8DequantizeDescriptor>;

// How a matrix is cut into pieces: on the CPU 128 elements of a row, a unit each; on CUDA what a warp has,
// some rows of kWarpBytes of output, and kUnitWarps of them a unit. All rows of a piece are in one group
// of 32.
constexpr int kMxfp8PieceColumns = 128;
constexpr int kMxfp8WarpRows = 2;
static_assert(kMxfp8Block % kMxfp8WarpRows == 0);

}  // namespace zerofp4
