#pragma once
// What zerofp4._C, which knows nothing of torch, hands to zerofp4._autograd, which is built against it.

#include <memory>

#include "common/args/grouped_values.h"
#include "common/args/product.h"
#include "common/args/target.h"
#include "cuda/gemm/product.h"

namespace zerofp4 {

// A copy of a quantized matrix in compact scales, and where its values [rows, cols] go. columnwise: it is a
// copy of their transpose.
struct CopyCall {
    const void* data;
    const void* scale;
    const void* amax;
    void* values;
    int64_t rows;
    int64_t cols;
    int64_t block_rows;
    int e4m3_max;
    bool columnwise;
};

// Copies of so many matrices [rows, cols] as they are stored, one behind the other, in compact scales, and
// where their values go likewise, without global scales.
struct StackCall {
    int64_t count;
    const void* data;
    const void* scale;
    void* values;
    int64_t rows;
    int64_t cols;
    int64_t block_rows;
};

// Each returns null, or what went wrong: text that stays until the thread calls again.
struct KernelCalls {
    const char* (*dequantize)(const Target&, DType, const CopyCall&) noexcept;
    // Quantizes args.input with amaxes of its own, which go to `amax` and, of the transform, to
    // `hadamard_amax`; one of them may be null, and those of args are not read. experts: matrices of a stack.
    const char* (*quantize)(const Target&, const QuantizeArgs& args, int64_t experts, float* amax,
                            float* hadamard_amax) noexcept;
    const char* (*quantize_groups)(const Target&, const GroupedArgs& args, float* amax,
                                   float* hadamard_amax) noexcept;
    const char* (*group_values)(const Target&, const GroupedValuesArgs&) noexcept;
    const char* (*stacked_values)(const Target&, DType, const StackCall&, const void* neutral_amax) noexcept;
    // The values of two factors, of rowwise copies and without their global scales, and float[1] alpha, the
    // product of those.
    const char* (*product_values)(const Target&, DType, const CopyCall&, const CopyCall&,
                                  const void* neutral_amax, void* alpha) noexcept;
    // Null where cuBLASLt has no algorithm. Found once for each problem.
    const char* (*find_product)(int device, const ProductProblem&, std::shared_ptr<cuda::Product>&) noexcept;
    const char* (*run_product)(const Target&, cuda::Product&, const ProductAddresses&) noexcept;
};

// The name of a capsule with KernelCalls; the number changes with them, and with what zerofp4/ops calls.
constexpr const char* kCallsCapsule = "zerofp4._C.kernel_calls 1";

}  // namespace zerofp4
