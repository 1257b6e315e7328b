#pragma once
// Arguments of the operations on one given tensor: 1D quantize, dequantize, scale layouts.

#include "common/dtype.h"
#include "common/layout.h"
#include "common/scale.h"

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

// A matrix and where its quantized copies go.
struct QuantizeArgs {
    const void* input;  // [rows, cols] of `dtype`, contiguous
    DType dtype;
    int64_t rows;
    int64_t cols;        // even
    int32_t block_rows;  // 1, or 16 for tiles, where both copies have the same blocks
    int32_t hadamard;    // the columnwise copy is of the transform along its rows; block_rows is 1
    uint32_t signs;      // of the transform (hadamard.h)
    FourOverSix choice;
    const int64_t* rng_state;  // int64[2]: stochastic rounding; or null
    const float* amax;         // float[1] of the rowwise copy, and of the columnwise one where that is null
    const float* columnwise_amax;  // float[1], or null
    const float* skip;             // float[1]: nothing is written where it is not 0; or null
    uint8_t* rowwise_data;         // [rows, cols / 2], or null
    uint8_t* columnwise_data;      // [cols, rows / 2] (with hadamard: rows up to a multiple of 16), or null
    void* values;  // [rows, cols] of `dtype`, what the rowwise codes stand for, or null
    uint8_t* rowwise_scale[kScaleLayouts];     // by ScaleLayout, null where there is no buffer
    uint8_t* columnwise_scale[kScaleLayouts];  // of the transpose
};

// The largest magnitudes of a matrix: its own and that of its transform along the columns.
struct AmaxArgs {
    const void* input;  // [rows, cols] of `dtype`, contiguous
    DType dtype;
    int64_t rows;
    int64_t cols;
    uint32_t signs;
    const float* skip;     // as in QuantizeArgs
    float* amax;           // float[1], or null
    float* hadamard_amax;  // float[1], or null
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

// Element formats that floats are rounded to.
enum class Format : int32_t { kE2M1 = 0, kE4M3 = 1, kBFloat16 = 2, kFloat16 = 3 };

// input * factor, element by element.
struct ConvertArgs {
    const float* input;  // [numel]
    float factor;
    int64_t numel;
    Format format;
    void* output;  // [numel]: bytes, with an E2M1 code in the low nibble of its own; or 16-bit floats
};

}  // namespace zerofp4
