// grouped_values, a row of output at a time.

#include "common/args/grouped_values.h"
#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kRowGrain = 4;  // rows that are worth a thread

void decode_line(GroupLines lines, int64_t row, int64_t count) {
    lines.move(row, 0);
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t code = lines.data[i / 2] >> (i % 2 != 0 ? 4 : 0) & 15u;
        store_float(e2m1_to_float(code) * block_decode(lines.scale[i / kBlock], lines.amax), lines.output[i]);
    }
}

void decode_across(const GroupedValuesArgs& args, int64_t row, int64_t stop) {
    for (int64_t group = 0; row < stop && group < args.count; ++group) {
        const GroupLines lines = lines_of(args, group);
        for (; row < least(stop, lines.end); ++row) decode_line(lines, row - lines.begin, args.cols);
    }
}

void decode_along(const GroupedValuesArgs& args, int64_t begin, int64_t stop) {
    for (int64_t group = 0; group < (*args.error ? 1 : args.places()); ++group) {
        const GroupLines lines = lines_of(args, group);
        for (int64_t row = begin; row < stop; ++row) decode_line(lines, row, lines.end - lines.begin);
    }
}

}  // namespace

void grouped_values(const GroupedValuesArgs& args, int threads) {
    for (int64_t group = 0; group < args.count; ++group) args.ends[group] = end_of_group(args, group);
    parallel_shares(args.rows(), threads, kRowGrain, [&](int64_t begin, int64_t end) {
        (args.columnwise ? decode_along : decode_across)(args, begin, end);
    });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
