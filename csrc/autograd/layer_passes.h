#pragma once
// The passes of a linear layer of an NVFP4 recipe: exact products of quantized operands in all three. Its
// node (layer.cpp) and the operators that compiled code calls (layer_operators.cpp) run them.

#include "autograd/quantization.h"

namespace zerofp4 {

// Conditions

// Whether these are the codes of a weight [rows, cols] on the device, with values, if there are some, as
// products of x read them.
bool are_codes(const Codes& codes, int64_t rows, int64_t cols, const c10::Device& device,
               at::ScalarType x_dtype);
// Whether a layer with a weight [rows, cols] can take x and bias, which may be undefined.
bool fits_layer(const Tensor& x, int64_t rows, int64_t cols, const Tensor& bias, const Scheme& scheme);

// Passes

struct Operands {
    Quantized x;  // with its columnwise copy, if that was asked for
    Codes weight;
};

// Of y [..., N] from x [..., K]. codes: of the weight, none where it is quantized here.
Operands quantize_operands(const Tensor& x, const Tensor& weight, Codes codes, bool keeps_x,
                           const Scheme& scheme, const Launch& launch);
// y, of what was quantized.
Tensor multiply_operands(const Tensor& x, const Operands& operands, const Tensor& bias, const Launch& launch);

// y's gradient [..., N], whose random numbers are drawn here.
Quantized quantize_gradient(const Tensor& grad, bool rowwise, bool columnwise, const Scheme& scheme,
                            const Launch& launch);
// [..., K], from the rowwise copy of y's gradient [..., N].
Tensor gradient_of_x(const Tensor& grad, const Copy& q_grad, const Codes& weight, at::ScalarType dtype,
                     const Launch& launch);
// [N, K], from the columnwise copies; in `out` if that is defined.
Tensor gradient_of_weight(const Copy& q_grad, const Copy& x, at::ScalarType dtype, const Tensor& out,
                          const Launch& launch);
// The same, unrounded, added to float32 `out`.
void add_gradient_of_weight(const Copy& q_grad, const Copy& x, const Tensor& out, const Launch& launch);

}  // namespace zerofp4
