#pragma once
// What every node in C++ needs: Python's objects, kernels, whether tensors and torch's state are plain.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "autograd/calls.h"
#include "autograd/functions.h"

namespace zerofp4 {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Python's side

struct Gil {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Gil() { PyGILState_Release(state); }
};

struct NoGil {
    PyThreadState* state = PyEval_SaveThread();
    ~NoGil() { PyEval_RestoreThread(state); }
};

// Needs the GIL, which may be gone when the error is caught.
[[noreturn]] inline void throw_python_error() {
    python_error error;
    error.persist();
    throw error;
}

inline THPObjectPtr checked(PyObject* result) {
    if (result == nullptr) throw_python_error();
    return THPObjectPtr(result);
}

inline bool is_exact(PyObject* object) { return THPVariable_CheckExact(object); }

inline THPObjectPtr wrapped(const Tensor& tensor) {
    return checked(tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None));
}

inline Tensor unwrapped(PyObject* object) {
    return object == Py_None ? Tensor() : Tensor(THPVariable_Unpack(object));
}

// The class of NVFP4Tensor. Needs configure().
PyTypeObject* weight_type();

// Kernels

// Those of zerofp4._C. Needs connect().
const KernelCalls& kernels();
// Raises what one of them says.
inline void check(const char* error) { TORCH_CHECK(error == nullptr, error); }

// The device of a tensor and its current stream. Needs configure().
Target target_of(const Tensor& tensor);

// A copy of a quantized matrix: data uint8 [rows, cols / 2] and compact scales as they are stored, amax
// float32 [1]. Of a stack of matrices each has their number as its first dimension. Of groups of rows it is
// as in ops/quantize.py, and they alone know of rows and columns.
struct Copy {
    Tensor data, scale, amax;
    int64_t block_rows = 1;
    int e4m3_max = 0;

    bool defined() const { return data.defined(); }
    int64_t rows() const { return data.size(-2); }
    int64_t cols() const { return 2 * data.size(-1); }
};

// columnwise: of the transpose of what is stored.
Tensor values_of(const Copy& copy, bool columnwise, at::ScalarType dtype, const Target& target);

// Conditions

// No inference mode, no dispatch mode, no transform of torch.func, no tracing; autocast only where it may be
// on.
inline bool is_default_state(bool autocast) {
    const auto state = c10::impl::tls_local_dispatch_key_set();
    // A node runs without names in a torch that still has named tensors, which plain ones do not notice.
    if (state.included_ != c10::default_included_set ||
        !((state.excluded_ - c10::default_excluded_set) & kPlain).empty())
        return false;
    // The keys that are excluded by default are those of autocast.
    return autocast || (state.excluded_ | c10::default_excluded_set) == state.excluded_;
}

// A dense tensor on a CPU or a GPU, with no other behavior.
inline bool is_dense(const Tensor& tensor) { return (tensor.key_set() | kPlain) == kPlain; }
inline bool is_plain(const Tensor& tensor) { return is_dense(tensor) && !tensor.is_inference(); }

// Whether forward AD differentiates by the tensor. Not to be asked with the GIL: it takes a lock of the
// tensor that another thread may hold while it waits for the GIL, as when it makes the node of a leaf.
inline bool has_tangent(const Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

// As in common/dtype.h; -1 for what kernels do not write.
inline int dtype_code(at::ScalarType dtype) {
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

// Whether a tensor's storage reaches to its last element.
inline bool has_memory(const Tensor& tensor) {
    if (tensor.numel() == 0) return true;
    int64_t last = tensor.storage_offset();
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return tensor.storage().nbytes() >= static_cast<size_t>(last + 1) * tensor.itemsize();
}

// The same of one that is not empty, whose elements lie where a GPU can load them.
inline bool holds(const Tensor& tensor) {
    if (tensor.numel() == 0 || !has_memory(tensor)) return false;
    return tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.itemsize() == 0;
}

// Nodes

// std::shared_ptr<Node>, or from torch 2.13 on an intrusive pointer.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class T, class... Arguments>
NodePointer new_node(Arguments&&... given) {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
        return NodePointer(new T(std::forward<Arguments>(given)...));
    } else {
        return c10::make_intrusive<T>(std::forward<Arguments>(given)...);
    }
}

struct OwnNode : Node {
    std::mutex mutex;  // two threads may go back through one graph

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
        TORCH_CHECK(
            false,
            "compiled autograd cannot trace a product with a quantized weight: call backward() without "
            "it, or compile its forward pass instead");
    }
};

// Shows nodes of a class to Python by this name.
template <class T>
void register_node(const char* name) {
    using torch::autograd::THPCppFunction_input_metadata;
    using torch::autograd::THPCppFunction_metadata;
    using torch::autograd::THPCppFunction_next_functions;
    using torch::autograd::THPCppFunction_requires_grad;
    static PyGetSetDef properties[] = {THP_FUNCTION_DEFAULT_PROPERTIES, {}};
    static PyTypeObject type;
    torch::autograd::_initFunctionPyTypeObject(type, name, properties, nullptr);
    torch::autograd::registerCppFunction(typeid(T), &type);
}

// In a backward pass, memory for the gradient of a node's weight; undefined if it has no place.
// Needs the GIL, and configure().
Tensor gradient_place(const NodePointer& node, at::ScalarType dtype);

// A matrix of all its last dimension's rows.
inline Tensor as_rows(const Tensor& tensor) {
    return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

}  // namespace zerofp4
