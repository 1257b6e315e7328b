#pragma once
// What zerofp4._C, which knows nothing of torch, hands to zerofp4._autograd, which is built against it.

#include <cstdint>

namespace zerofp4 {

// One copy of a quantized matrix in compact scales, and where its values [rows, cols] go.
struct DequantizeCall {
    int device;  // as in Target
    int64_t stream;
    int threads;
    const void* data;
    const void* scale;
    const void* amax;
    void* output;
    int64_t rows;
    int64_t cols;
    bool columnwise;
    int64_t block_rows;
    int e4m3_max;
    int dtype;
};

// Returns null, or what went wrong: text that stays until the thread calls again.
using DequantizeFunction = const char* (*)(const DequantizeCall&) noexcept;

// The name of a capsule with a DequantizeFunction. The number changes with the struct, and with what
// zerofp4/ops calls: so an extension of an older build is not used.
constexpr const char* kDequantizeCapsule = "zerofp4._C.dequantize_function 5";

}  // namespace zerofp4
