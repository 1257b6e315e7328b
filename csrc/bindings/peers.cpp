// Memory that the ranks of one host share, and their barrier.

#include "common/args/peers.h"

#include "bindings/bindings.h"
#include "bindings/struct_class.h"

namespace zerofp4::bindings {
namespace {

void barrier(const Target& target, const BarrierArgs& args) {
    dispatch(
        target,
        [](const cpu::Kernels&, int) { throw std::runtime_error("a barrier of GPUs was called on the CPU"); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.barrier(args, stream); });
}

}  // namespace

void bind_peers(py::module_& m) {
    m.attr("MAX_PEERS") = kMaxPeers;
    using Args = BarrierArgs;
    struct_class<Args>(m, "BarrierArgs",
                       {FIELD(Args, flags), FIELD(Args, passed), FIELD(Args, failed), FIELD(Args, status),
                        FIELD(Args, rank), FIELD(Args, count), FIELD(Args, timeout_ns)});
    m.def("barrier", &barrier, NoGil());
}

}  // namespace zerofp4::bindings
