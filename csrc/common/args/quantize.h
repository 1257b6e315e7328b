#pragma once
// Quantizing one matrix, and its amaxes.

#include "common/dtype.h"
#include "common/four_over_six.h"
#include "common/layout.h"

namespace zerofp4 {

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
    void* values;                  // [rows, cols] of `dtype`, what the rowwise codes stand for, or null
    uint8_t* rowwise_scale[kScaleLayouts];     // by ScaleLayout, null where there is no buffer
    uint8_t* columnwise_scale[kScaleLayouts];  // of the transpose
    float* stored_amax;                        // float[1]: the amaxes are copied there (given ones); or null
    float* stored_columnwise_amax;             // float[1], or null
};

// Once per call, by one thread.
ZEROFP4_HD void store_amaxes(const QuantizeArgs& args) {
    if (args.stored_amax) *args.stored_amax = *args.amax;
    if (args.stored_columnwise_amax) *args.stored_columnwise_amax = *args.columnwise_amax;
}

ZEROFP4_HD bool is_skipped(const float* skip) { return skip && *skip != 0.0f; }

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

// Matrix e of a stack [experts, rows, cols]: every buffer holds those of all matrices one behind the
// other, each with its padding. `first` is the stack's first. A skip is one for all.
ZEROFP4_HD QuantizeArgs matrix_of(const QuantizeArgs& first, int64_t e) {
    const int64_t row_blocks = ceil_div(first.rows, kBlock), col_blocks = ceil_div(first.cols, kBlock);
    const bool tiles = first.block_rows == kBlock;
    const int64_t compact = (tiles ? row_blocks : first.rows) * col_blocks;
    const int64_t columnwise_compact = (tiles ? col_blocks : first.cols) * row_blocks;
    const int64_t bytes = first.rows * first.cols * size_of(first.dtype);
    const int64_t across = round_up(first.rows, kAtomRows) * round_up(col_blocks, kAtomColumns);
    const int64_t along = round_up(first.cols, kAtomRows) * round_up(row_blocks, kAtomColumns);
    const auto move = [e](auto*& p, int64_t step) { p = p ? p + e * step : p; };
    QuantizeArgs args = first;
    args.input = static_cast<const uint8_t*>(first.input) + e * bytes;
    if (first.values) args.values = static_cast<uint8_t*>(first.values) + e * bytes;
    move(args.rng_state, 2);
    move(args.amax, 1);
    move(args.columnwise_amax, 1);
    move(args.rowwise_data, first.rows * (first.cols / 2));
    move(args.columnwise_data, first.cols * (first.rows / 2));
    for (int layout = 0; layout < kScaleLayouts; ++layout) {
        move(args.rowwise_scale[layout], layout == kCompact ? compact : across);
        move(args.columnwise_scale[layout], layout == kCompact ? columnwise_compact : along);
    }
    move(args.stored_amax, 1);
    move(args.stored_columnwise_amax, 1);
    return args;
}

ZEROFP4_HD AmaxArgs matrix_of(const AmaxArgs& first, int64_t e) {
    AmaxArgs args = first;
    args.input =
        static_cast<const uint8_t*>(first.input) + e * first.rows * first.cols * size_of(first.dtype);
    if (first.amax) args.amax = first.amax + e;
    if (first.hadamard_amax) args.hadamard_amax = first.hadamard_amax + e;
    return args;
}

}  // namespace zerofp4
