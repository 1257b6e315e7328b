#pragma once
// Calls of Python with the arguments of an operator, as the dispatcher of torch would hand them over.

#include <ATen/core/List.h>
#include <torch/csrc/DynamicTypes.h>

#include <array>
#include <optional>

#include "autograd/plain.h"

namespace zerofp4 {

inline THPObjectPtr to_python(const Tensor& tensor) { return wrapped(tensor); }
inline THPObjectPtr to_python(const std::optional<Tensor>& tensor) {
    return wrapped(tensor.value_or(Tensor()));
}
inline THPObjectPtr to_python(PyObject* object) { return checked(Py_NewRef(object)); }
inline THPObjectPtr to_python(int64_t number) { return checked(PyLong_FromLongLong(number)); }
inline THPObjectPtr to_python(bool is_true) { return checked(PyBool_FromLong(is_true)); }
inline THPObjectPtr to_python(at::ScalarType dtype) {
    return checked(Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))));
}
inline THPObjectPtr to_python(c10::string_view text) {
    return checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

// A list of tensors, some of which may not be there.
template <class Tensors>
THPObjectPtr to_python(const Tensors& tensors) {
    THPObjectPtr list = checked(PyList_New(0));
    for (const std::optional<Tensor> tensor : tensors)
        if (PyList_Append(list, to_python(tensor).get()) < 0) throw_python_error();
    return list;
}

// Needs the GIL.
template <class... Arguments>
THPObjectPtr call_python(PyObject* function, const Arguments&... arguments) {
    std::array<THPObjectPtr, sizeof...(Arguments)> objects{to_python(arguments)...};
    std::array<PyObject*, sizeof...(Arguments)> given;
    for (size_t i = 0; i < objects.size(); ++i) given[i] = objects[i].get();
    return checked(PyObject_Vectorcall(function, given.data(), given.size(), nullptr));
}

}  // namespace zerofp4
