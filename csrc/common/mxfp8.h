#pragma once
// MXFP8: E4M3 elements, and for every 32 of them along a row or a column a scale, which is a power of two
// (E8M0: byte b means 2^(b - 127), 255 means NaN). Products with a scale are exact, but for what is far below
// the smallest element.

#include "common/e4m3.h"
#include "common/layout.h"

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

}  // namespace zerofp4
