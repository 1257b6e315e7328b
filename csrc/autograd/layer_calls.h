#pragma once
// What zerofp4._C, which knows nothing of torch, hands to zerofp4._autograd for the layers of a recipe.

#include <memory>

#include "common/args/grouped_values.h"
#include "common/args/product.h"
#include "common/args/target.h"
#include "cuda/gemm/product.h"

namespace zerofp4 {

// A factor of a product: a copy of a quantized matrix as it is stored, in compact scales, and where its
// values [rows, cols] go, without the global scale.
struct ProductOperand {
    const void* data;
    const void* scale;
    const void* amax;
    void* values;
    int64_t rows;
    int64_t cols;
    int64_t block_rows;
    int e4m3_max;
};

// Copies of matrices [rows, cols] of one shape as they are stored, by address, in compact scales, and where
// their values go one behind the other, without global scales.
struct StackedOperand {
    int64_t count;
    const uintptr_t* data;
    const uintptr_t* scale;
    void* values;
    int64_t rows;
    int64_t cols;
    int64_t block_rows;
};

// Each returns null, or what went wrong: text that stays until the thread calls again.
struct LayerFunctions {
    // Quantizes args.input with amaxes of its own, which go to `amax` and, of the transform, to
    // `hadamard_amax`; one of them may be null, and those of args are not read. experts: matrices of a stack.
    const char* (*quantize)(const Target&, const QuantizeArgs& args, int64_t experts, float* amax,
                            float* hadamard_amax) noexcept;
    const char* (*quantize_groups)(const Target&, const GroupedArgs& args, float* amax,
                                   float* hadamard_amax) noexcept;
    const char* (*group_values)(const Target&, const GroupedValuesArgs&) noexcept;
    const char* (*stacked_values)(const Target&, DType, const StackedOperand&,
                                  const void* neutral_amax) noexcept;
    // The values of two factors, and float[1] alpha, the product of their global scales.
    const char* (*product_values)(const Target&, DType, const ProductOperand&, const ProductOperand&,
                                  const void* neutral_amax, void* alpha) noexcept;
    // Null where cuBLASLt has no algorithm. Found once for each problem.
    const char* (*find_product)(int device, const ProductProblem&, std::shared_ptr<cuda::Product>&) noexcept;
    const char* (*run_product)(const Target&, cuda::Product&, const ProductAddresses&) noexcept;
};

// The name of a capsule with LayerFunctions. The number changes with them.
constexpr const char* kLayerCapsule = "zerofp4._C.layer_functions 4";

}  // namespace zerofp4
