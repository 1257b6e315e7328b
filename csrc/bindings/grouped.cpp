// The same for a matrix in groups of rows.

#include "bindings/bindings.h"
#include "common/hadamard.h"

namespace zerofp4::bindings {
namespace {

GroupSplits group_splits(uintptr_t rows, bool wide, int32_t count, int64_t tokens) {
    return {pointer<const void>(rows), wide, count, tokens};
}

void grouped_amax(const Target& target, uintptr_t input, int dtype, int64_t rows, int64_t cols,
                  bool random_signs, const GroupSplits& splits, uintptr_t amax, uintptr_t hadamard_amax) {
    const AmaxArgs whole{pointer<const void>(input),
                         static_cast<DType>(dtype),
                         rows,
                         cols,
                         random_signs ? kRandomSigns : 0,
                         nullptr,
                         pointer<float>(amax),
                         pointer<float>(hadamard_amax)};
    const GroupedAmaxArgs args{whole, splits};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.grouped_amax(args, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.grouped_amax(args, stream); });
}

void quantize_grouped(const Target& target, const QuantizeArgs& whole, const GroupSplits& splits,
                      uintptr_t offsets, uintptr_t error) {
    const GroupedArgs args{whole, splits, pointer<int64_t>(offsets), pointer<int32_t>(error)};
    dispatch(
        target, [&](const cpu::Kernels& k, int threads) { k.quantize_grouped(args, threads); },
        [&](const cuda::Kernels& k, cudaStream_t stream) { k.quantize_grouped(args, stream); });
}

}  // namespace

void bind_grouped(py::module_& m) {
    py::class_<GroupSplits>(m, "GroupSplits")
        .def(py::init(&group_splits), "rows"_a, "wide"_a, "count"_a, "tokens"_a);
    m.def("grouped_amax", &grouped_amax, NoGil());
    m.def("quantize_grouped", &quantize_grouped, NoGil());
}

}  // namespace zerofp4::bindings
