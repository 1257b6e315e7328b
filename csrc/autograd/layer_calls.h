#pragma once
// What zerofp4._C, which knows nothing of torch, hands to zerofp4._autograd for the layers of a recipe.

#include <memory>

#include "common/args/product.h"
#include "common/args/quantize.h"
#include "common/args/target.h"
#include "cuda/gemm/product.h"

namespace zerofp4 {

// A factor of a product: a copy of a quantized matrix as it is stored, in compact scales, and where its
// values [rows, cols] go, without the global scale: null for one of two factors whose values are there
// already.
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

// Each returns null, or what went wrong: text that stays until the thread calls again.
struct LayerFunctions {
    // Quantizes args.input with amaxes of its own, which go to `amax` and, of the transform, to
    // `hadamard_amax`; one of them may be null, and those of args are not read.
    const char* (*quantize)(const Target&, const QuantizeArgs& args, float* amax,
                            float* hadamard_amax) noexcept;
    // The values of two factors, and float[1] alpha, the product of their global scales.
    const char* (*product_values)(const Target&, DType, const ProductOperand&, const ProductOperand&,
                                  const void* neutral_amax, void* alpha) noexcept;
    // Null where cuBLASLt has no algorithm. Found once for each problem.
    const char* (*find_product)(int device, const ProductProblem&, std::shared_ptr<cuda::Product>&) noexcept;
    const char* (*run_product)(const Target&, cuda::Product&, const ProductAddresses&) noexcept;
};

// The name of a capsule with LayerFunctions. The number changes with them.
constexpr const char* kLayerCapsule = "zerofp4._C.layer_functions 3";

}  // namespace zerofp4
