// The plans of a step: CastPlan and TransposePlan.

#include "bindings/bindings.h"
#include "bindings/struct_class.h"
#include "dispatch/plan.h"

namespace zerofp4::bindings {

void bind_cast(py::module_& m) {
    using Weight = WeightDescriptor;
    struct_class<Weight>(
        m, "WeightDescriptor",
        {FIELD(Weight, master), FIELD(Weight, start), FIELD(Weight, numel), FIELD(Weight, rows),
         FIELD(Weight, cols), FIELD(Weight, master_dtype), FIELD(Weight, weight_dtype), FIELD(Weight, codes),
         FIELD(Weight, amax), FIELD(Weight, columnwise_amax), FIELD(Weight, rowwise_scale),
         FIELD(Weight, columnwise_scale), FIELD(Weight, tile_offset), FIELD(Weight, amax_offset),
         FIELD(Weight, block_rows), FIELD(Weight, e4m3_max), FIELD(Weight, squared_error),
         FIELD(Weight, own_offset), FIELD(Weight, cut_offsets)});
    using Transpose = TransposeDescriptor;
    struct_class<Transpose>(
        m, "TransposeDescriptor",
        {FIELD(Transpose, input), FIELD(Transpose, output), FIELD(Transpose, rows), FIELD(Transpose, cols)});

    py::class_<CastPlan>(m, "CastPlan")
        .def(py::init<bool, std::vector<WeightDescriptor>, uintptr_t, int64_t, float, uintptr_t, uintptr_t>(),
             py::kw_only(), "on_cpu"_a, "weights"_a, "reduced"_a, "reduced_numel"_a, "hash"_a, "found_inf"_a,
             "status"_a)
        .def("descriptor_bytes", [](const CastPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &CastPlan::set_device_descriptors)
        .def("begin", &CastPlan::begin, "target"_a, "error"_a, NoGil())
        .def("scale", &CastPlan::scale, NoGil())
        .def("cast_before", &CastPlan::cast_before, NoGil())
        .def("cast_from", &CastPlan::cast_from, NoGil())
        .def("spread_scales", &CastPlan::spread_scales, NoGil())
        .def("begin_amax", &CastPlan::begin_amax, NoGil())
        .def("scale_cast", &CastPlan::scale_cast, NoGil());
    py::class_<TransposePlan>(m, "TransposePlan")
        .def(py::init<bool, std::vector<TransposeDescriptor>>(), "on_cpu"_a, "items"_a)
        .def("descriptor_bytes", [](const TransposePlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &TransposePlan::set_device_descriptors)
        .def("run", &TransposePlan::run, NoGil());
}

}  // namespace zerofp4::bindings
