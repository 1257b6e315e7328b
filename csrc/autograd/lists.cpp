// What a step asks of hundreds of tensors, in one loop each. zerofp4/ops/tensor_lists.py is the only caller,
// and asks the same in Python without this extension.

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <utility>

#include "autograd/functions.h"

namespace zerofp4 {
namespace {

using at::Tensor;

// The tensor of item i of a list; Python's TypeError for what is no tensor.
const Tensor& tensor_at(PyObject* list, Py_ssize_t i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    TORCH_CHECK_TYPE(PyObject_TypeCheck(item, reinterpret_cast<PyTypeObject*>(THPVariableClass)), "item ", i,
                     " is a ", Py_TYPE(item)->tp_name, ", not a tensor");
    return THPVariable_Unpack(item);
}

Py_ssize_t size_of(PyObject* list) {
    TORCH_CHECK_TYPE(PyList_Check(list), "expected a list of tensors, got a ", Py_TYPE(list)->tp_name);
    return PyList_GET_SIZE(list);
}

// A list of what make(tensor), a new reference, is for each tensor.
template <class Make>
PyObject* map(PyObject* tensors, Make make) {
    const Py_ssize_t count = size_of(tensors);
    THPObjectPtr made(PyList_New(count));
    if (!made) throw python_error();
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* item = make(tensor_at(tensors, i));
        if (item == nullptr) throw python_error();
        PyList_SET_ITEM(made.get(), i, item);
    }
    return made.release();
}

// Whether a dense tensor's storage reaches to its last element.
bool has_memory(const Tensor& tensor) {
    if (tensor.numel() == 0) return true;
    int64_t last = tensor.storage_offset();
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return tensor.storage().nbytes() >= static_cast<size_t>(last + 1) * tensor.itemsize();
}

}  // namespace

// addresses(tensors): the address of each as an int64, in one bytes object.
PyObject* addresses(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    const Py_ssize_t count = size_of(tensors);
    THPObjectPtr bytes(PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(sizeof(int64_t))));
    if (!bytes) return nullptr;
    auto* to = reinterpret_cast<int64_t*>(PyBytes_AS_STRING(bytes.get()));
    for (Py_ssize_t i = 0; i < count; ++i)
        to[i] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor_at(tensors, i).data_ptr()));
    return bytes.release();
    END_HANDLE_TH_ERRORS
}

// are_plain(tensors and Nones): whether each tensor is of class torch.Tensor itself, dense on a CPU or a GPU,
// without a lazy sign or conjugation, and its storage holds all its elements.
PyObject* are_plain(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    const Py_ssize_t count = size_of(tensors);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* item = PyList_GET_ITEM(tensors, i);
        if (item == Py_None) continue;
        if (reinterpret_cast<PyObject*>(Py_TYPE(item)) != THPVariableClass) Py_RETURN_FALSE;
        const Tensor& tensor = THPVariable_Unpack(item);
        if ((tensor.key_set() | kPlain) != kPlain || !has_memory(tensor)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

// gradients(tensors): the grad of each.
PyObject* gradients(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    return map(tensors, [](const Tensor& tensor) { return THPVariable_Wrap(tensor.grad()); });
    END_HANDLE_TH_ERRORS
}

// increment_versions(tensors): autograd's count of writes to each, but for those of inference mode.
PyObject* increment_versions(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    const Py_ssize_t count = size_of(tensors);
    for (Py_ssize_t i = 0; i < count; ++i) {
        const Tensor& tensor = tensor_at(tensors, i);
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// versions(tensors): autograd's count of writes to each.
PyObject* versions(PyObject*, PyObject* tensors) {
    HANDLE_TH_ERRORS
    return map(tensors, [](const Tensor& tensor) { return PyLong_FromLongLong(tensor._version()); });
    END_HANDLE_TH_ERRORS
}

}  // namespace zerofp4
