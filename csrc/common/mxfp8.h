#pragma once
// MXFP8: E4M3 elements, and for every 32 of them along a row or a column a scale, which is a power of two
// (E8M0: byte b means 2^(b - 127), 255 means NaN). Products with a scale are exact, but for what is far below
// the smallest element.

#include "common/dtype.h"
#include "common/e4m3.h"
#include "common/layout.h"
#include "common/list.h"
#include "common/single.h"

namespace zerofp4 {

constexpr int kMxfp8Block = 32;

// The scale byte of a block: its largest magnitude over 448, rounded up to a power of two. Up to 2^-127 it is
// 0; 254 for inf, 255 for NaN.
ZEROFP4_HD uint32_t mxfp8_scale(float block_amax) {
    const uint32_t bits = to_bits(block_amax * (1.0f / kE4M3Max));
    const uint32_t byte = (bits + 0x007fffffu) >> 23;  // 255 for inf, 256 for NaN, which no finite one gives
    return bits <= 0x00400000u ? 0u : byte - (byte >= 255u ? 1u : 0u);
}

// 2^(byte - 127), what elements are multiplied with to get values back.
ZEROFP4_HD float mxfp8_decode(uint32_t byte) {
    const uint32_t bits = byte == 0u ? 0x00400000u : byte << 23;
    return from_bits(byte == 255u ? 0x7fc00000u : bits);
}

// 2^(127 - byte), what values are multiplied with before they are rounded to E4M3.
ZEROFP4_HD float mxfp8_encode(uint32_t byte) {
    const uint32_t bits = byte == 254u ? 0x00400000u : (254u - byte) << 23;
    return from_bits(byte == 255u ? 0x7fc00000u : bits);
}

// Bytes of swizzled scales: of the block that element (row, col) is in, along its row or its column.
ZEROFP4_HD int64_t mxfp8_rowwise_offset(int64_t row, int64_t col, int64_t cols) {
    return swizzled_offset(row, col / kMxfp8Block, ceil_div(cols, kMxfp8Block));
}
ZEROFP4_HD int64_t mxfp8_columnwise_offset(int64_t row, int64_t col, int64_t rows) {
    return swizzled_offset(col, row / kMxfp8Block, ceil_div(rows, kMxfp8Block));
}

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
