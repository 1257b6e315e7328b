// The same for a matrix in groups of rows.

#include "bindings/bindings.h"
#include "common/hadamard.h"
#include "dispatch/quantize.h"

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
    zerofp4::grouped_amax(target, args);
}

void quantize_grouped(const Target& target, const QuantizeArgs& whole, const GroupSplits& splits,
                      uintptr_t offsets, uintptr_t error) {
    const GroupedArgs args{whole, splits, pointer<int64_t>(offsets), pointer<int32_t>(error)};
    zerofp4::quantize_grouped(target, args);
}

// amaxes: own and other, or null both.
void grouped_values(const Target& target, uintptr_t data, uintptr_t scale,
                    const std::array<uintptr_t, 2>& amaxes, int other_e4m3_max, uintptr_t offsets,
                    uintptr_t data_offsets, uintptr_t error, uintptr_t output, uintptr_t ends, int64_t tokens,
                    int64_t cols, int64_t data_rows, int32_t count, bool columnwise) {
    const GroupedValuesArgs args{pointer<const uint8_t>(data),
                                 pointer<const uint8_t>(scale),
                                 pointer<const float>(amaxes[0]),
                                 pointer<const float>(amaxes[1]),
                                 decode_factor(static_cast<float>(other_e4m3_max)),
                                 pointer<const int64_t>(offsets),
                                 pointer<const int64_t>(data_offsets),
                                 pointer<const int32_t>(error),
                                 pointer<BFloat16>(output),
                                 pointer<int32_t>(ends),
                                 tokens,
                                 cols,
                                 data_rows,
                                 count,
                                 columnwise};
    zerofp4::grouped_values(target, args);
}

}  // namespace

void bind_grouped(py::module_& m) {
    py::class_<GroupSplits>(m, "GroupSplits")
        .def(py::init(&group_splits), "rows"_a, "wide"_a, "count"_a, "tokens"_a);
    m.def("grouped_amax", &grouped_amax, NoGil());
    m.def("quantize_grouped", &quantize_grouped, NoGil());
    m.def("grouped_values", &grouped_values, NoGil());
}

}  // namespace zerofp4::bindings
