// The module: what it was built for, and every family of operations.

#include "bindings/bindings.h"
#include "common/args/cast.h"

namespace zerofp4::bindings {
namespace {

py::dict build() {
    py::dict info;
    info["isas"] = ZEROFP4_ISAS;
#if defined(ZEROFP4_CUDA_VERSION)
    info["cuda_version"] = ZEROFP4_CUDA_VERSION;
    info["cuda_architectures"] = ZEROFP4_CUDA_ARCHITECTURES;
#endif
    return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.attr("HEADER_WORDS") = kHeaderWords;
    m.attr("ERROR_WORD") = kErrorWord;
    m.attr("HASH_WORD") = kHashWord;
    m.attr("PEER_ERROR") = static_cast<int>(kPeerError);
    m.attr("PLAN_MISMATCH") = static_cast<int>(kPlanMismatch);
    m.attr("GATHER_REFUSED") = static_cast<int>(kGatherRefused);
    m.attr("GATHER_WITHOUT_STEP") = static_cast<int>(kGatherWithoutStep);
    m.attr("STATUS_RANK_SHIFT") = kStatusRankShift;
    m.def("build", &build);
    m.def("cpu_isa", [] { return cpu::kernels().isa; });

    py::class_<Target>(m, "Target").def(py::init<int, int64_t, int>(), "device"_a, "stream"_a, "threads"_a);
    bind_calls(m);
    bind_cast(m);
    bind_comm(m);
    bind_lists(m);
    bind_mxfp8(m);
    bind_optim(m);
    bind_product(m);
    bind_quantize(m);
    bind_records(m);
}

}  // namespace zerofp4::bindings
