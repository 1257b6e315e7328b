// gather_pack and gather_unpack: packed codes into the staging buffer and out of it.

#include "cpu/device/parallel.h"
#include "cpu/kernels.h"

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int64_t kGatherGrain = 8;  // units that are worth a thread

void copy_items(const GatherItems& all, int threads) {
    parallel_items(all.items, all.count, &GatherDescriptor::unit_begin, all.units, threads, kGatherGrain,
                   [](const GatherDescriptor& item, int64_t begin, int64_t end) {
                       if (begin == 0 && item.low) item.output[0] = shared_byte(*item.low, item.input[0]);
                       const int64_t first = copied_span(item, begin).begin;
                       const int64_t last = copied_span(item, end - 1).end;
                       if (first < last)
                           std::memcpy(item.output + first, item.input + first,
                                       static_cast<size_t>(last - first));
                   });
}

}  // namespace

void gather_pack(const GatherTable& table, int32_t known, int threads) {
    const int32_t state = own_state(table, known);
    *state_of(table, table.rank) = state;
    if (state == kPresent) copy_items(table.own, threads);
}

void gather_unpack(const GatherTable& table, int threads) {
    for (int32_t rank = 0; rank < table.ranks; ++rank) {
        if (*state_of(table, rank) != kPresent) return report_refusal(table);
    }
    copy_items(table.received, threads);
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
