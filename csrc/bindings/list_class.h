#pragma once
// Classes of lists of tensors, for Python.

#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/bindings.h"

namespace zerofp4::bindings {

// The class of a list, made from one flat list of integers, `fields` for each item: an object per item would
// cost the host more than the launch. `make` gives an item from its integers.
template <class List, class Option, class Make>
void list_class(py::module_& m, const char* name, size_t fields, const char* option, const Make& make) {
    const auto build = [fields, make](bool on_cpu, const std::vector<int64_t>& words, Option chosen) {
        if (words.size() % fields != 0)
            throw py::value_error("items do not have as many fields as they must");
        std::vector<decltype(make(words.data()))> items;
        items.reserve(words.size() / fields);
        for (size_t i = 0; i < words.size(); i += fields) items.push_back(make(words.data() + i));
        return std::make_unique<List>(on_cpu, std::move(items), chosen);
    };
    py::class_<List>(m, name)
        .def(py::init(build), "on_cpu"_a, "words"_a, py::arg(option))
        .def_property_readonly("count", &List::count)
        .def("descriptor_bytes", [](const List& list) { return py::bytes(list.descriptor_bytes()); })
        .def("set_device_descriptors", &List::set_device_descriptors)
        .def("run", &List::run, NoGil());
}

}  // namespace zerofp4::bindings
