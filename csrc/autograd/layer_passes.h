#pragma once
// The passes of a layer of an NVFP4 recipe: exact products of quantized operands in all three. A linear layer
// has one weight. A layer of groups has a stack of weights, one for each group of rows, which torch's
// grouped_mm multiplies in one launch; zerofp4/gemm/grouped.py says how that rounds.

#include "autograd/quantization.h"

namespace zerofp4 {

// Conditions

// Whether a layer with a weight [rows, cols], or a stack of those, can take x, splits and bias. splits and
// bias may be undefined; splits are on x's device.
bool fits_layer(const Tensor& x, const Tensor& splits, int64_t rows, int64_t cols, const Tensor& bias,
                const Scheme& scheme);
// Whether y's gradient, the groups of x, its columnwise copy and the rows of the weight belong to one call of
// such a layer. x, or the weight, may be undefined.
bool fits_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight, int64_t cols,
                    const Scheme& scheme);

// Passes

struct Operands {
    Groups groups;  // of x, in a layer of those
    Quantized x;    // with its columnwise copy, if that was asked for
    Copy weight;
};

// Of y from x. weight: quantized here if `rows` is undefined.
Operands quantize_operands(const Tensor& x, const Tensor& splits, const Tensor& weight, Copy rows,
                           bool keeps_x, const Scheme& scheme, const Launch& launch);
// y, of what was quantized.
Tensor multiply_operands(const Tensor& x, const Operands& operands, const Tensor& bias, const Launch& launch);

// Gradients of x, of the weight and of the bias; undefined if not asked for.
struct Gradients {
    Tensor x, weight, bias;
};

struct GradientOptions {
    at::ScalarType x_dtype, weight_dtype;
    Tensor out;  // of the weight's gradient, undefined for new memory
    bool adds;   // to out, in float32
    bool bias_needs;
};

// From y's gradient, whose random numbers are drawn here. x: its columnwise copy, for the gradient of the
// weight. weight: its rows, for the gradient of x.
Gradients make_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight,
                         const GradientOptions& options, const Scheme& scheme, const Launch& launch);

// The passes of groups, which those above call.
namespace grouped {
bool fits_layer(const Tensor& x, const Tensor& splits, int64_t rows, int64_t cols, const Tensor& bias);
bool fits_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight);
Tensor multiply_operands(const Operands& operands, const Tensor& bias, const Launch& launch);
Gradients make_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Copy& weight,
                         const GradientOptions& options, const Scheme& scheme, const Launch& launch);
}  // namespace grouped

}  // namespace zerofp4
