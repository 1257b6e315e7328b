#pragma once
// zerofp4._C: addresses, sizes and streams as integers, no torch. zerofp4/ops is its only caller and
// checks everything before it calls. Each family of operations has a file and registers itself.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "common/layout.h"
#include "dispatch/target.h"

namespace zerofp4::bindings {

namespace py = pybind11;
using namespace py::literals;

using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Calls run(kernels, threads or stream), with the kernels of the CPU or of CUDA.
template <class Run>
void on_either(const Target& target, const Run& run) {
    dispatch(target, run, run);
}

void bind_calls(py::module_& m);
void bind_cast(py::module_& m);
void bind_comm(py::module_& m);
void bind_lists(py::module_& m);
void bind_mxfp8(py::module_& m);
void bind_optim(py::module_& m);
void bind_product(py::module_& m);
void bind_quantize(py::module_& m);
void bind_records(py::module_& m);

}  // namespace zerofp4::bindings
