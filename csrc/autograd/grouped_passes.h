#pragma once
// The passes of a layer of groups: products of groups of rows, each with a matrix of its own, in one launch
// of torch's grouped_mm. zerofp4/gemm/grouped.py says how they round, zerofp4/nn/grouped_function.py has the
// same in Python.

#include <ATen/core/Tensor.h>

#include "autograd/quantization.h"

namespace zerofp4 {

// Whether a layer can take x [tokens, K], splits, weights and biases: those of each group, or a stack. codes:
// of the weights; not defined() where the weights are quantized for the call.
bool fits_groups(const Tensor& x, const Tensor& splits, at::TensorList weights, at::TensorList biases,
                 const Codes& codes, const Scheme& scheme);

// Whether y's gradient [tokens, N], the groups of x, its columnwise copy and the weights belong to one call
// of such a layer: x, or the weights, may be none.
bool fits_grouped_gradients(const Tensor& grad, const Groups& groups, const Copy& x, const Codes& weights);

// Passes

struct GroupedOperands {
    QuantizedGroups x;  // with its columnwise copy, if that was asked for
    Codes weights;
};

// Of y bfloat16 [tokens, N] from x [tokens, K]. codes: of the weights, undefined where they are quantized
// here.
GroupedOperands quantize_grouped_operands(const Tensor& x, const Tensor& splits, at::TensorList weights,
                                          Codes codes, bool keeps_x, const Scheme& scheme,
                                          const Launch& launch);
// y, of what was quantized.
Tensor multiply_grouped_operands(const GroupedOperands& operands, at::TensorList biases,
                                 const Launch& launch);

// y's gradient [tokens, N], whose random numbers are drawn here.
QuantizedGroups quantize_grouped_gradient(const Tensor& grad, const Tensor& splits, bool rowwise,
                                          bool columnwise, const Scheme& scheme, const Launch& launch);
// bfloat16 [tokens, K], from the rowwise copy of y's gradient.
Tensor gradient_of_grouped_x(const QuantizedGroups& grad, const Codes& weights, const Launch& launch);
// bfloat16 [groups, N, K], from the columnwise copies; `groups` are those of x.
Tensor gradient_of_grouped_weights(const QuantizedGroups& grad, const Copy& x, const Groups& groups,
                                   const Launch& launch);
// float32 [groups, N]
Tensor gradient_of_grouped_biases(const Tensor& grad, const Tensor& offsets);

}  // namespace zerofp4
