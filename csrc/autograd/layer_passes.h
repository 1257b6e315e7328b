#pragma once
// The passes of a linear layer of an NVFP4 recipe: exact products of quantized operands in all three. Its
// node (layer.cpp) and the operators that compiled code calls (layer_operators.cpp) run them.

#include <Python.h>

#include "autograd/layer_calls.h"
#include "autograd/plain.h"

namespace zerofp4 {

// What the passes need of Python and of zerofp4._C. Both stay for as long as the process lives.
void configure_passes(PyObject* neutral_amax, const LayerFunctions* functions);

// How the layers of a recipe quantize on a device.
struct Scheme {
    int hadamard;
    int random_signs;
    int stochastic;
    FourOverSix choice;  // of inputs, and of weights that are quantized for a call
    int has_tiles;       // such weights are in blocks of 16x16
    int by_cublaslt;
};

constexpr const char* kSchemeCapsule = "zerofp4._autograd.scheme";

// Where the launches of one pass run. neutral_amax: with which values have no global scale. apart: copies
// have memory of their own, each buffer: operators must not return tensors that share theirs.
struct Launch {
    Target target;
    Tensor neutral_amax;
    bool by_cublaslt;
    bool apart;

    Launch(const Tensor& tensor, int64_t stream, Tensor neutral, const Scheme& scheme, bool apart = false);
};

// On the current stream of the tensor's device. Needs the GIL.
Launch begin_launch(const Tensor& tensor, const Scheme& scheme, bool apart = false);

// Copies

int e4m3_max_of(const FourOverSix& choice);

// A copy of a quantized matrix: data uint8 [rows, cols / 2] and compact scales as they are stored, amax
// float32 [1].
struct Copy {
    Tensor data, scale, amax;
    int64_t block_rows = 1;
    int e4m3_max = 0;

    bool defined() const { return data.defined(); }
    int64_t rows() const { return data.size(0); }
    int64_t cols() const { return 2 * data.size(1); }
};

struct Quantized {
    Copy rowwise, columnwise;
};

// Conditions

// Whether the storage reaches to the last element of a tensor, whose elements lie where a GPU can load them.
bool holds(const Tensor& tensor);
bool is_readable(const Copy& copy);

// Whether these are the codes of a matrix [rows, cols] on the device.
bool are_codes(const Copy& codes, int64_t rows, int64_t cols, const c10::Device& device);
// Whether these are values of the codes as products of x read them.
bool are_values(const Tensor& kept, const Copy& codes, at::ScalarType x_dtype);
// Whether a weight can be quantized on the device.
bool is_quantizable(const Tensor& weight, const Scheme& scheme, const c10::Device& device);
// Whether a layer with a weight [rows, cols] can take x and bias, which may be undefined.
bool fits_layer(const Tensor& x, int64_t rows, int64_t cols, const Tensor& bias, const Scheme& scheme);

// Passes

struct Forward {
    Tensor y;
    Copy weight;
    Copy x;  // its columnwise copy, if that was asked for
};

// y [..., N] of x [..., K]. codes: of the weight, undefined where it is quantized here. kept: values of
// those, or undefined.
Forward forward_pass(const Tensor& x, const Tensor& weight, const Tensor& bias, Copy codes,
                     const Tensor& kept, bool keeps_x, const Scheme& scheme, const Launch& launch);

// y's gradient [..., N], whose random numbers are drawn here.
Quantized quantize_gradient(const Tensor& grad, bool rowwise, bool columnwise, const Scheme& scheme,
                            const Launch& launch);
// [..., K], from the rowwise copy of y's gradient [..., N]. kept: as in the forward pass.
Tensor gradient_of_x(const Tensor& grad, const Copy& q_grad, const Copy& weight, const Tensor& kept,
                     at::ScalarType dtype, const Launch& launch);
// [N, K], from the columnwise copies; in `out` if that is defined.
Tensor gradient_of_weight(const Copy& q_grad, const Copy& x, at::ScalarType dtype, const Tensor& out,
                          const Launch& launch);
// The same, unrounded, added to float32 `out`.
void add_gradient_of_weight(const Copy& q_grad, const Copy& x, const Tensor& out, const Launch& launch);

}  // namespace zerofp4
