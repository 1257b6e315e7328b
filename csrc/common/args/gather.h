#pragma once
// The gather of packed codes: every rank packs its bytes of all weights into its slot of a staging buffer, a
// collective fills in the slots of the others, and each rank takes their bytes out of it.

#include "common/args/cast.h"

namespace zerofp4 {

// What a rank says in the first word of its slot. Unless all say kPresent, no rank takes anything.
enum GatherState : int32_t {
    kPresent = 0,
    kFailed = 1,  // it found an error
    kOther = 2,   // it wants another gather
    kNoStep = 3,  // the step before it did not take place
};

// A run of bytes of one weight, one rank's, on their way into a slot or out of it. Offsets in the staging
// buffer and in the weight leave the same remainder of 16, so that vectors can be copied.
struct GatherDescriptor {
    const uint8_t* input;
    uint8_t* output;
    const uint8_t* low;  // the byte with the low code of the first byte, whose high code alone is the
                         // shard's; null where the shard begins with a byte
    int64_t bytes;
    int64_t unit_begin;
};

struct GatherItems {
    const GatherDescriptor* items;  // `count` of them, on the device that runs the gather
    int64_t count;
    int64_t units;
    const int32_t* unit_items;  // CUDA: the item of every unit
};

// Everything both stages need, passed by value.
struct GatherTable {
    GatherItems own;       // from this rank's weights into its slot
    GatherItems received;  // from the slots into the weights
    uint8_t* staging;      // [ranks, slot]
    int64_t slot;          // bytes, a multiple of 16
    int32_t rank;
    int32_t ranks;
    const float*
        reduced;      // the vector of the steps of this plan, or null where no step belongs to the gather
    float hash;       // of that plan
    int32_t* status;  // int32[1] that the host can read (pinned for CUDA), or null
};

// Of this many bytes of the output, cut at multiples of it, one unit copies what belongs to its item: a
// thread block on CUDA.
constexpr int kGatherUnit = 32768;
constexpr int kGatherVector = 16;

ZEROFP4_HD int64_t bytes_past(const void* p, int64_t multiple) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) & static_cast<uintptr_t>(multiple - 1));
}

ZEROFP4_HD int64_t gather_units(const GatherDescriptor& item) {
    return ceil_div(bytes_past(item.output, kGatherVector) + item.bytes, kGatherUnit);
}

// Bytes [begin, end) of an item.
struct ByteSpan {
    int64_t begin;
    int64_t end;
};

// What a unit copies as it is: all of its bytes but a first one that two ranks share.
ZEROFP4_HD ByteSpan copied_span(const GatherDescriptor& item, int64_t unit) {
    const int64_t first = item.low == nullptr ? 0 : 1;
    const int64_t begin = unit * kGatherUnit - bytes_past(item.output, kGatherVector);
    const int64_t end = begin + kGatherUnit;
    return {begin < first ? first : begin, end < item.bytes ? end : item.bytes};
}

// A byte of which each nibble belongs to another rank.
ZEROFP4_HD uint8_t shared_byte(uint8_t low, uint8_t high) {
    return static_cast<uint8_t>((low & 0x0f) | (high & 0xf0));
}

ZEROFP4_HD int32_t* state_of(const GatherTable& table, int32_t rank) {
    return reinterpret_cast<int32_t*>(table.staging + rank * table.slot);
}

// What this rank says: what the host knows, or else what the last step came to.
ZEROFP4_HD int32_t own_state(const GatherTable& table, int32_t known) {
    if (known != kPresent || table.reduced == nullptr) return known;
    return header_status(table.reduced, table.hash) == kOk ? kPresent : kNoStep;
}

// Tells the host of the first rank that refused, unless it has yet to hear of something else.
ZEROFP4_HD void report_refusal(const GatherTable& table) {
    if (table.status == nullptr || *table.status != kOk) return;
    int32_t rank = 0;
    while (rank + 1 < table.ranks && *state_of(table, rank) == kPresent) ++rank;
    const int32_t kind = *state_of(table, rank) == kNoStep ? kGatherWithoutStep : kGatherRefused;
    *table.status = kind | rank << kStatusRankShift;
}

}  // namespace zerofp4
