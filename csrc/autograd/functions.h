// What zerofp4._autograd has, by the file that defines it.

#pragma once

#include <Python.h>
#include <c10/core/DispatchKeySet.h>

namespace zerofp4 {

// Dispatch keys of a dense tensor on a CPU or a GPU, with no other behavior.
inline constexpr c10::DispatchKeySet kPlain({c10::DispatchKey::CPU, c10::DispatchKey::CUDA,
                                             c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
                                             c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU,
                                             c10::DispatchKey::AutocastCUDA});

// layer.cpp
PyObject* configure_layer(PyObject*, PyObject* given);
PyObject* layer(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* scheme(PyObject*, PyObject* given);

// linear.cpp
PyObject* configure(PyObject*, PyObject* given);
PyObject* linear(PyObject*, PyObject* const* given, Py_ssize_t count);

// lists.cpp
PyObject* addresses(PyObject*, PyObject* tensors);
PyObject* facts(PyObject*, PyObject* tensors);
PyObject* gradients(PyObject*, PyObject* tensors);
PyObject* plain_facts(PyObject*, PyObject* tensors);
PyObject* state_facts(PyObject*, PyObject* given);
PyObject* versions(PyObject*, PyObject* tensors);

// operators.cpp
PyObject* implement(PyObject*, PyObject* dequantize_in_python);

}  // namespace zerofp4
