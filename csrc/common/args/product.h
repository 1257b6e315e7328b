#pragma once
// A product of two matrices with what a product of quantized ones does to its sums.

#include "common/dtype.h"

namespace zerofp4 {

// What is multiplied: plain matrices of a dtype, packed NVFP4 codes, or MXFP8 elements. Those of a format
// have swizzled scales.
enum class Inputs : int32_t { kBFloat16 = 1, kFloat16 = 2, kNVFP4 = 3, kMXFP8 = 4 };

constexpr bool has_scales(Inputs inputs) { return inputs == Inputs::kNVFP4 || inputs == Inputs::kMXFP8; }

// out [rows, cols] = alpha * (a b^T) + bias, rounded once, or added to what out holds. a [rows, contraction]
// and b [cols, contraction] are row-major, or, if they are plain, the transposes of row-major matrices; out
// is row-major, bias [cols] of out's dtype. No size is 0. With scales the contraction is a multiple of 32 and
// cols one of 16.
struct ProductProblem {
    int64_t rows;
    int64_t cols;
    int64_t contraction;
    Inputs inputs;
    DType output;
    bool a_transposed;
    bool b_transposed;
    bool accumulate;
    // Powers of two that divide the addresses; bias 0 where there is none.
    uint32_t a_alignment;
    uint32_t b_alignment;
    uint32_t bias_alignment;
    uint32_t output_alignment;
};

struct ProductAddresses {
    const void* a;
    const void* b;
    const void* a_scale;  // multiples of 16; null of plain matrices
    const void* b_scale;
    const float* alpha;  // float[1] where the operation runs; null for 1
    const void* bias;    // null where the problem has none
    void* output;
    void* workspace;
};

}  // namespace zerofp4
