// The operators that code by torch.compile calls, dispatched in C++. Schemas and fakes stay in Python.
// Arguments that are not plain go to the implementation in Python, which computes the same bytes, or says
// that memory was freed.

#include <torch/library.h>

#include "autograd/call_python.h"
#include "autograd/quantization.h"

namespace zerofp4 {
namespace {

PyObject* python_dequantize;  // the implementation in Python, for as long as the process lives

// zerofp4::dequantize
Tensor dequantize(const Tensor& data, const Tensor& scale, const Tensor& amax, int64_t block_rows,
                  at::ScalarType dtype, c10::string_view layout, int64_t e4m3_max, bool columnwise) {
    const Copy copy{data, scale, amax, block_rows, static_cast<int>(e4m3_max)};
    const bool is_usual = data.defined() && data.dim() == 2 && layout == "compact" &&
                          dtype_code(dtype) >= 0 && are_codes(copy, copy.rows(), copy.cols(), data.device());
    if (is_usual) return values_of(copy, columnwise, dtype, target_of(data));
    Gil gil;
    return unwrapped(
        call_python(python_dequantize, data, scale, amax, block_rows, dtype, layout, e4m3_max, columnwise));
}

}  // namespace

// implement(dequantize): dispatch the operator here. dequantize: its implementation in Python.
PyObject* implement(PyObject*, PyObject* dequantize_in_python) {
    HANDLE_TH_ERRORS
    python_dequantize = Py_NewRef(dequantize_in_python);
    // Not a static of the file: nothing of torch is touched before its version was compared.
    static auto* library =
        new torch::Library(torch::Library::FRAGMENT, "zerofp4", std::nullopt, __FILE__, __LINE__);
    library->impl("dequantize", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(dequantize)));
    library->impl("dequantize", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(dequantize)));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
