// The operators that code by torch.compile calls, dispatched in C++. Schemas and fakes stay in Python, and so
// do the checks: arguments that are not plain go to the implementation in Python, which says what is wrong
// with them, or computes the same bytes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "autograd/dequantize_call.h"
#include "autograd/functions.h"

namespace zerofp4 {
namespace {

using at::Tensor;

// What implement() was given, for as long as the process lives.
struct {
    PyObject* dequantize;  // the implementation in Python
    PyObject* check_cuda;
    PyObject* current_stream;
    DequantizeFunction run;
    uint64_t checked_gpus;
} python;

struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
};

// Needs the GIL, which may be gone when the error is caught.
THPObjectPtr checked(PyObject* result) {
    if (result == nullptr) {
        python_error error;
        error.persist();
        throw error;
    }
    return THPObjectPtr(result);
}

// As in common/dtype.h; -1 for what kernels do not write.
int dtype_code(at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return 0;
        case at::kBFloat16:
            return 1;
        case at::kHalf:
            return 2;
        default:
            return -1;
    }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A dense tensor on the CPU or a GPU with no other behavior: not a fake, not functional, no negative bit.
// Whether a kernel may be handed the tensor as one of these sizes: its storage holds all of it.
bool fits(const Tensor& tensor, c10::IntArrayRef sizes, const c10::Device& device) {
    if ((tensor.key_set() | kPlain) != kPlain || tensor.device() != device || tensor.sizes() != sizes ||
        tensor.numel() == 0 || !tensor.is_contiguous())
        return false;
    const auto end = static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
    return tensor.storage().nbytes() >= end &&
           reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.itemsize() == 0;
}

bool is_scale(const Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kByte;
}

int64_t current_stream(c10::DeviceIndex index) {
    Gil gil;
    THPObjectPtr number = checked(PyLong_FromLong(index));
    if (index >= 64 || (python.checked_gpus >> index & 1) == 0) {
        checked(PyObject_CallOneArg(python.check_cuda, number));
        if (index < 64) python.checked_gpus |= uint64_t{1} << index;
    }
    THPObjectPtr handle = checked(PyObject_CallOneArg(python.current_stream, number));
    const int64_t stream = PyLong_AsLongLong(handle);
    if (stream == -1 && PyErr_Occurred()) checked(nullptr);
    return stream;
}

Tensor dequantize_in_python(const Tensor& data, const Tensor& scale, const Tensor& amax, int64_t block_rows,
                            at::ScalarType dtype, c10::string_view layout, int64_t e4m3_max,
                            bool columnwise) {
    Gil gil;
    auto wrapped = [](const Tensor& tensor) {
        return checked(tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None));
    };
    THPObjectPtr tensors[] = {wrapped(data), wrapped(scale), wrapped(amax)};
    THPObjectPtr name =
        checked(PyUnicode_FromStringAndSize(layout.data(), static_cast<Py_ssize_t>(layout.size())));
    THPObjectPtr result = checked(PyObject_CallFunction(
        python.dequantize, "OOOLOOLO", tensors[0].get(), tensors[1].get(), tensors[2].get(),
        static_cast<long long>(block_rows), reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)),
        name.get(), static_cast<long long>(e4m3_max), columnwise ? Py_True : Py_False));
    return THPVariable_Unpack(result.get());
}

// zerofp4::dequantize
Tensor dequantize(const Tensor& data, const Tensor& scale, const Tensor& amax, int64_t block_rows,
                  at::ScalarType dtype, c10::string_view layout, int64_t e4m3_max, bool columnwise) {
    const bool is_plain = data.defined() && scale.defined() && amax.defined() && data.dim() == 2 &&
                          layout == "compact" && (block_rows == 1 || block_rows == 16) &&
                          (e4m3_max == 448 || e4m3_max == 256) && dtype_code(dtype) >= 0 &&
                          data.scalar_type() == at::kByte && is_scale(scale) &&
                          amax.scalar_type() == at::kFloat;
    const auto device = is_plain ? data.device() : c10::Device(at::kCPU);
    if (!is_plain || !fits(data, data.sizes(), device) || !fits(amax, {1}, device) ||
        !fits(scale, {ceil_div(data.size(0), block_rows), ceil_div(data.size(1), 8)}, device))
        return dequantize_in_python(data, scale, amax, block_rows, dtype, layout, e4m3_max, columnwise);
    const int64_t rows = data.size(0), cols = 2 * data.size(1);
    DequantizeCall call{};
    call.device = data.is_cpu() ? -1 : data.get_device();
    call.stream = data.is_cpu() ? 0 : current_stream(data.device().index());
    call.threads = data.is_cpu() ? at::get_num_threads() : 0;
    call.rows = columnwise ? cols : rows;
    call.cols = columnwise ? rows : cols;
    Tensor values = at::empty({call.rows, call.cols}, data.options().dtype(dtype));
    call.data = data.const_data_ptr();
    call.scale = scale.const_data_ptr();
    call.amax = amax.const_data_ptr();
    call.output = values.mutable_data_ptr();
    call.columnwise = columnwise;
    call.block_rows = block_rows;
    call.e4m3_max = static_cast<int>(e4m3_max);
    call.dtype = dtype_code(dtype);
    const char* error = python.run(call);
    TORCH_CHECK(error == nullptr, error);
    return values;
}

}  // namespace

// implement(dequantize, check_cuda, current_stream, dequantize_function): dispatch the operators here.
PyObject* implement(PyObject*, PyObject* given) {
    HANDLE_TH_ERRORS
    PyObject* capsule;
    if (!PyArg_ParseTuple(given, "OOOO", &python.dequantize, &python.check_cuda, &python.current_stream,
                          &capsule))
        return nullptr;
    void* function = PyCapsule_GetPointer(capsule, kDequantizeCapsule);
    if (function == nullptr) return nullptr;
    python.run = reinterpret_cast<DequantizeFunction>(function);
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
