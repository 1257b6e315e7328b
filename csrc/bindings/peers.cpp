// Memory that the ranks of one host share, and their barrier.

#include <algorithm>

#include "bindings/bindings.h"

namespace zerofp4::bindings {

PeerRows peer_rows(const std::vector<uintptr_t>& addresses) {
    if (addresses.size() > kMaxPeers)
        throw std::invalid_argument("at most " + std::to_string(kMaxPeers) + " ranks can share memory, got " +
                                    std::to_string(addresses.size()));
    PeerRows rows{};
    std::transform(addresses.begin(), addresses.end(), rows.of, pointer<const void>);
    return rows;
}

namespace {

BarrierArgs barrier_args(const std::vector<uintptr_t>& flags, uintptr_t passed, uintptr_t failed,
                         uintptr_t status, int rank, int64_t timeout_ns) {
    const PeerRows rows = peer_rows(flags);
    BarrierArgs args{};
    std::transform(rows.of, rows.of + flags.size(), args.flags,
                   [](const void* p) { return static_cast<uint32_t*>(const_cast<void*>(p)); });
    args.passed = pointer<uint32_t>(passed);
    args.failed = pointer<float>(failed);
    args.status = pointer<int32_t>(status);
    args.rank = rank;
    args.count = static_cast<int32_t>(flags.size());
    args.timeout_ns = timeout_ns;
    return args;
}

void run_barrier(const BarrierArgs& args, const Target& target) {
    dispatch(
        target,
        [](const cpu::Kernels&, int) { throw std::runtime_error("a barrier of GPUs was called on the CPU"); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.barrier(args, stream); });
}

}  // namespace

void bind_peers(py::module_& m) {
    m.attr("MAX_PEERS") = kMaxPeers;
    py::class_<BarrierArgs>(m, "Barrier")
        .def(py::init(&barrier_args), py::kw_only(), "flags"_a, "passed"_a, "failed"_a, "status"_a, "rank"_a,
             "timeout_ns"_a)
        .def("run", &run_barrier, "target"_a, NoGil());
}

}  // namespace zerofp4::bindings
