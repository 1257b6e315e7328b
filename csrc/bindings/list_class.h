#pragma once
// Classes of lists of tensors, for Python.

#include "bindings/bindings.h"

namespace zerofp4::bindings {

// What the classes of lists have in common.
template <class List>
py::class_<List> list_class(py::module_& m, const char* name) {
    return py::class_<List>(m, name)
        .def("descriptor_bytes", [](const List& list) { return py::bytes(list.descriptor_bytes()); })
        .def("set_device_descriptors", &List::set_device_descriptors)
        .def("run", &List::run, NoGil());
}

}  // namespace zerofp4::bindings
