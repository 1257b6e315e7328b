#pragma once
// input * factor in another format, element by element, with the conversions that the kernels use. A library
// of its own, which tests build: the extension has no use for it.

#include <cstdint>

enum Format : int { kE2M1 = 0, kE4M3 = 1, kBFloat16 = 2, kFloat16 = 3 };

// `output` holds bytes, with an E2M1 code in the low nibble of its own, or 16-bit floats. Returns 0, or
// CUDA's number of an error; `stream` is for CUDA.
extern "C" int convert(const float* input, float factor, int64_t numel, int format, void* output,
                       void* stream);
