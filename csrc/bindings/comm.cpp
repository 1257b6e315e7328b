// What ranks exchange: the gather of packed codes, and the barrier of the ranks of one host.

#include "bindings/bindings.h"
#include "bindings/struct_class.h"
#include "common/args/peers.h"
#include "dispatch/gather.h"

namespace zerofp4::bindings {
namespace {

void barrier(const Target& target, const BarrierArgs& args) {
    dispatch(
        target,
        [](const cpu::Kernels&, int) { throw std::runtime_error("a barrier of GPUs was called on the CPU"); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.barrier(args, stream); });
}

}  // namespace

void bind_comm(py::module_& m) {
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
    m.attr("MAX_PEERS") = kMaxPeers;
    using Args = BarrierArgs;
    struct_class<Args>(m, "BarrierArgs",
                       {FIELD(Args, flags), FIELD(Args, passed), FIELD(Args, failed), FIELD(Args, status),
                        FIELD(Args, rank), FIELD(Args, count), FIELD(Args, timeout_ns)});
    m.def("barrier", &barrier, NoGil());
}

}  // namespace zerofp4::bindings
