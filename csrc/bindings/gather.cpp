// The gather of packed codes.

#include "dispatch/gather.h"

#include "bindings/bindings.h"

namespace zerofp4::bindings {

void bind_gather(py::module_& m) {
    m.attr("GATHER_PRESENT") = static_cast<int>(kPresent);
    m.attr("GATHER_FAILED") = static_cast<int>(kFailed);
    m.attr("GATHER_OTHER") = static_cast<int>(kOther);
    m.attr("GATHER_VECTOR") = kGatherVector;
    py::class_<GatherPlan>(m, "GatherPlan")
        .def(py::init<bool, const std::vector<int64_t>&, const std::vector<int64_t>&, uintptr_t, int64_t, int,
                      int, uintptr_t, float, uintptr_t>(),
             py::kw_only(), "on_cpu"_a, "own"_a, "received"_a, "staging"_a, "slot"_a, "rank"_a, "ranks"_a,
             "reduced"_a, "hash"_a, "status"_a)
        .def("descriptor_bytes", [](const GatherPlan& plan) { return py::bytes(plan.descriptor_bytes()); })
        .def("set_device_descriptors", &GatherPlan::set_device_descriptors)
        .def("pack", &GatherPlan::pack, "target"_a, "state"_a, NoGil())
        .def("unpack", &GatherPlan::unpack, "target"_a, NoGil());
}

}  // namespace zerofp4::bindings
