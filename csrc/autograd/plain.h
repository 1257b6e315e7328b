#pragma once
// What every node in C++ needs: the GIL, Python's objects, and whether tensors and the state of torch are
// plain.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <type_traits>
#include <utility>

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

// The handle of the current stream of a GPU that our kernels run on. Needs the GIL, and configure().
int64_t current_stream(c10::DeviceIndex index);

// A copy of a quantized matrix, or of its transpose if it is columnwise, with compact scales, and the stream
// on which its values are computed.
struct Source {
    Tensor data, scale, amax;
    int64_t block_rows;
    int e4m3_max;
    bool columnwise;
    int64_t stream;
};

// Needs configure().
Tensor values_of(const Source& source, at::ScalarType dtype);

// The class of NVFP4Tensor, once configure() was called.
PyTypeObject* weight_type();

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
inline bool is_plain(const Tensor& tensor) {
    return (tensor.key_set() | kPlain) == kPlain && !tensor.is_inference();
}

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

// A matrix of all its last dimension's rows.
inline Tensor as_rows(const Tensor& tensor) {
    return tensor.dim() == 2 ? tensor : tensor.reshape({-1, tensor.size(-1)});
}

}  // namespace zerofp4
