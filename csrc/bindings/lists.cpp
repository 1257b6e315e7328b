// Operations on lists of matrices: dequantize and scale layouts.

#include "dispatch/lists.h"

#include "bindings/bindings.h"
#include "bindings/list_class.h"

namespace zerofp4::bindings {

void bind_lists(py::module_& m) {
    m.attr("ARGUMENT_ITEMS") = kArgumentItems;
    py::class_<DequantizeDescriptor>(m, "DequantizeDescriptor")
        .def(py::init(&dequantize_descriptor), py::kw_only(), "data"_a, "scale"_a, "amax"_a, "output"_a,
             "rows"_a, "cols"_a, "columnwise"_a, "block_rows"_a, "layout"_a, "e4m3_max"_a);
    list_class<DequantizeList>(m, "DequantizeList")
        .def(py::init<bool, std::vector<DequantizeDescriptor>, int>(), "on_cpu"_a, "items"_a, "dtype"_a);
    py::class_<ScaleLayoutDescriptor>(m, "ScaleLayoutDescriptor")
        .def(py::init(&scale_layout_descriptor), py::kw_only(), "input"_a, "output"_a, "rows"_a, "columns"_a,
             "block_rows"_a, "layout"_a);
    list_class<ScaleLayoutList>(m, "ScaleLayoutList")
        .def(py::init<bool, std::vector<ScaleLayoutDescriptor>, bool>(), "on_cpu"_a, "items"_a, "pad"_a);
}

}  // namespace zerofp4::bindings
