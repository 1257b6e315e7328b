#pragma once
// Work units: which of them a warp does, and to which item of a table (a weight, a transpose) a unit belongs.

#include "common/layout.h"
#include "cuda/device/launch.cuh"

namespace zerofp4::cuda {

// Of a strip (layout.h) a lane has so many neighbouring columns.
constexpr int kLaneColumns = kStripColumns / kLanes;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kLanes; }

// What is the same in all lanes, so that the compiler knows it: it then takes no register of the lanes, nor
// does what follows from it.
__device__ __forceinline__ uint32_t in_uniform_register(uint32_t x) { return __reduce_or_sync(kAllLanes, x); }
__device__ __forceinline__ int64_t in_uniform_register(int64_t x) {
    const uint64_t bits = static_cast<uint64_t>(x);
    const uint64_t high = in_uniform_register(static_cast<uint32_t>(bits >> 32));
    return static_cast<int64_t>(high << 32 | in_uniform_register(static_cast<uint32_t>(bits)));
}

// Every address in a table is one of global memory (pinned host memory included). Said aloud, because the
// compiler sees that only of addresses in kernel arguments, and takes slower generic accesses for those it
// reads from a table.
template <typename T>
__device__ __forceinline__ T* in_global(T* p) {
    __builtin_assume(__isGlobal(p));
    return p;
}

// The same of shared memory, of what a function that is not inlined is given.
template <typename T>
__device__ __forceinline__ T* in_shared(T* p) {
    __builtin_assume(__isShared(p));
    return p;
}

// This warp's number in the grid.
template <int kBlockWarps = kWarps>
__device__ __forceinline__ int64_t grid_warp() {
    return static_cast<int64_t>(blockIdx.x) * kBlockWarps + warp_index();
}

// The consecutive units of this block. Its warps take turns in them, so that what they read at one time lies
// side by side.
struct Share {
    int64_t begin;
    int64_t end;
};

template <int kPerBlock>
__device__ __forceinline__ Share block_share(int64_t units, int64_t block = blockIdx.x) {
    static_assert(kPerBlock % kWarps == 0, "as many turns for every warp");
    const int64_t begin = block * kPerBlock;
    return {begin, min(begin + kPerBlock, units)};
}

// The last of `length` items, from `first` on, that begins at or before the unit, as the first one does: a
// search in which every lane probes.
template <auto kBegin, typename Item>
__device__ __forceinline__ int64_t find_item(const Item* items, int64_t first, int64_t length, int64_t unit) {
    while (length > 1) {
        const int64_t step = ceil_div(length, kLanes);
        const int64_t probe = lane_index() * step;
        const bool begun = probe < length && items[first + probe].*kBegin <= unit;
        const int64_t passed = (__popc(__ballot_sync(kAllLanes, begun)) - 1) * step;
        first += passed;
        length = min(step, length - passed);
    }
    return first;
}

// Follows a rising sequence of units through a table. An item has the units from its own kBegin up to the
// next item's, the last one those up to `units`; items without units are passed over. *first_item is
// one at or before that of the first unit. A table of one is in the kernel's arguments (kSingle). All lanes
// of a warp must make the same calls.
template <typename Item, auto kBegin, bool kSingle>
class ItemCursor {
  public:
    __device__ __forceinline__ ItemCursor(const Item* items, int64_t count, int64_t units,
                                          const int32_t* first_item, const Item& single)
        : items_(kSingle ? &single : items),
          count_(kSingle ? 1 : count),
          units_(units),
          index_(kSingle ? 0 : *first_item) {}

    // True when the unit belongs to another item than the unit before it, as the first one does.
    __device__ __forceinline__ bool seek(int64_t unit) {
        if (unit < end_) return false;
        end_ = end_of_item();
        if (unit >= end_) {
            index_ = find_item<kBegin>(items_, index_, count_ - index_, unit);
            end_ = end_of_item();
        }
        return true;
    }

    __device__ __forceinline__ int64_t index() const { return kSingle ? 0 : index_; }
    __device__ __forceinline__ const Item& item() const { return items_[index()]; }

  private:
    __device__ __forceinline__ int64_t end_of_item() const {
        return index_ + 1 < count_ ? items_[index_ + 1].*kBegin : units_;
    }

    const Item* items_;
    int64_t count_;
    int64_t units_;
    int64_t index_;
    int64_t end_ = 0;  // of the present item; no unit is before 0, so that the first call moves
};

}  // namespace zerofp4::cuda
