#pragma once
// Rounding the elements of one array.

#include "common/macros.h"

namespace zerofp4 {

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
