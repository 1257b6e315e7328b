#pragma once
// What the module zerofp4._autograd takes from operators.cpp.

#include <Python.h>

namespace zerofp4 {

PyObject* implement(PyObject*, PyObject* given);

}  // namespace zerofp4
