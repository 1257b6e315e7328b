#pragma once
// Arguments of the operations on one given tensor: 1D quantize, dequantize, scale layouts.

#include "common/dtype.h"
#include "common/layout.h"

namespace zerofp4 {

// 1x16 blocks along the rows of x [rows, cols] and, for the columnwise copy, along the rows of its transpose.
struct QuantizeRowsArgs {
    const void* input;  // [rows, cols] of `dtype`, contiguous
    DType dtype;
    int64_t rows;
    int64_t cols;
    const float* amax;          // float[1]
    uint8_t* rowwise_data;      // [rows, cols / 2], or null with rowwise_scale
    uint8_t* rowwise_scale;     // [rows, ceil(cols / 16)]
    uint8_t* columnwise_data;   // [cols, rows / 2] (rows even), or null with columnwise_scale
    uint8_t* columnwise_scale;  // [cols, ceil(rows / 16)]
};

struct DequantizeArgs {
    const uint8_t* data;   // [rows, cols / 2]
    const uint8_t* scale;  // compact: [ceil(rows / block_rows), ceil(cols / 16)]
    const float* amax;     // float[1]
    int64_t rows;
    int64_t cols;
    int64_t block_rows;  // 1 or 16
    DType dtype;
    void* output;  // [rows, cols] of `dtype`
};

// Compact scales of [rows, cols] to a padded layout, padding zeroed; and back.
struct ScaleLayoutArgs {
    const uint8_t* input;
    uint8_t* output;
    int64_t rows;        // of the matrix
    int64_t cols;        // of the matrix, in elements
    int64_t block_rows;  // 1 or 16
    ScaleLayout layout;  // of the padded side: kExpanded or kSwizzled
};

}  // namespace zerofp4
