// tensor_amax: the largest magnitude of a matrix and that of its transform along the columns, in one pass.

#include "cpu/device/raise.h"
#include "cpu/kernels.h"
#include "cpu/quantize/parts.h"
#include "cpu/strip/values.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

struct Most {
    uint32_t plain;
    uint32_t transformed;
};

ZEROFP4_HD uint32_t most_of(const Values& values) {
    uint32_t columns[kPatchBlocks], most = 0;
    column_amaxes(values, columns);
    for (int c = 0; c < kPatchBlocks; ++c) most = larger(most, columns[c]);
    return most;
}

template <class T>
Most most_of_patches(const AmaxArgs& args, int64_t begin, int64_t end) {
    const int64_t across = ceil_div(args.cols, kStripColumns);
    Most most{};
    for (int64_t i = begin; i < end; ++i) {
        Values values;
        const Patch patch = patch_at(i / across, i % across, args.rows, args.cols);
        load_values(static_cast<const T*>(args.input), args.cols, patch, values);
        if (args.amax) most.plain = larger(most.plain, most_of(values));
        if (args.hadamard_amax) {
            transform_columns(args.dtype, args.signs, values);
            most.transformed = larger(most.transformed, most_of(values));
        }
    }
    return most;
}

}  // namespace

void raise_amaxes(const AmaxArgs& args, int64_t begin, int64_t end) {
    Most most{};
    with_dtype(args.dtype, [&](auto t) { most = most_of_patches<decltype(t)>(args, begin, end); });
    if (args.amax) raise_to(args.amax, amax_of_bits(most.plain));
    if (args.hadamard_amax) raise_to(args.hadamard_amax, amax_of_bits(most.transformed));
}

void tensor_amax(const AmaxArgs& args, int threads) {
    if (is_skipped(args.skip)) return;
    if (args.amax) *args.amax = 0.0f;
    if (args.hadamard_amax) *args.hadamard_amax = 0.0f;
    parallel_shares(patches_of(args.rows, args.cols), threads, kPatchGrain,
                    [&](int64_t begin, int64_t end) { raise_amaxes(args, begin, end); });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
