// The operators that code by torch.compile calls, dispatched in C++. Schemas and fakes stay in Python.
// Arguments that are not plain go to the implementation in Python, which computes the same bytes, or says
// that memory was freed.

#include <torch/library.h>

#include <optional>

#include "autograd/call_python.h"
#include "autograd/functions.h"
#include "autograd/plain.h"
#include "common/bits.h"

namespace zerofp4 {
namespace {

// What implement() was given, for as long as the process lives.
struct {
    PyObject* dequantize;  // the implementation in Python
} implementation;

// Whether a kernel may be handed the tensor as one of these sizes: its storage holds all of it.
bool fits(const Tensor& tensor, c10::IntArrayRef sizes, const c10::Device& device) {
    return (tensor.key_set() | kPlain) == kPlain && tensor.device() == device && tensor.sizes() == sizes &&
           tensor.is_contiguous() && holds(tensor);
}

bool is_scale(const Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kByte;
}

int64_t stream_of(const Tensor& tensor) {
    if (tensor.is_cpu()) return 0;
    Gil gil;
    return current_stream(tensor.device().index());
}

Tensor dequantize_in_python(const Tensor& data, const Tensor& scale, const Tensor& amax, int64_t block_rows,
                            at::ScalarType dtype, c10::string_view layout, int64_t e4m3_max,
                            bool columnwise) {
    Gil gil;
    THPObjectPtr result = call_python(implementation.dequantize, data, scale, amax, block_rows, dtype, layout,
                                      e4m3_max, columnwise);
    return THPVariable_Unpack(result.get());
}

// zerofp4::dequantize
Tensor dequantize(const Tensor& data, const Tensor& scale, const Tensor& amax, int64_t block_rows,
                  at::ScalarType dtype, c10::string_view layout, int64_t e4m3_max, bool columnwise) {
    const bool is_usual = data.defined() && scale.defined() && amax.defined() && data.dim() == 2 &&
                          layout == "compact" && (block_rows == 1 || block_rows == 16) &&
                          (e4m3_max == 448 || e4m3_max == 256) && dtype_code(dtype) >= 0 &&
                          data.scalar_type() == at::kByte && is_scale(scale) &&
                          amax.scalar_type() == at::kFloat;
    const auto device = is_usual ? data.device() : c10::Device(at::kCPU);
    if (!is_usual || !fits(data, data.sizes(), device) || !fits(amax, {1}, device) ||
        !fits(scale, {ceil_div(data.size(0), block_rows), ceil_div(data.size(1), 8)}, device))
        return dequantize_in_python(data, scale, amax, block_rows, dtype, layout, e4m3_max, columnwise);
    return values_of({data, scale, amax, block_rows, static_cast<int>(e4m3_max), columnwise, stream_of(data)},
                     dtype);
}

}  // namespace

// implement(dequantize, dequantize_function): dispatch the operators here.
PyObject* implement(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject* capsule;
    if (!PyArg_ParseTuple(given, "OO", &implementation.dequantize, &capsule)) return nullptr;
    Py_INCREF(given);  // and all that it holds
    // Not a static of the file: nothing of torch is touched before its version was compared.
    static auto* library =
        new torch::Library(torch::Library::FRAGMENT, "zerofp4", std::nullopt, __FILE__, __LINE__);
    library->impl("dequantize", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(dequantize)));
    library->impl("dequantize", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(dequantize)));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
