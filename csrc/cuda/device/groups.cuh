#pragma once
// Which group a thread block works on, found by every block from the splits in device memory: a prefix sum
// over all groups by its first warp, of which each lane takes a few consecutive ones.

#include "common/args/grouped.h"
#include "cuda/device/units.cuh"

namespace zerofp4::cuda {

// What a launch works on: a matrix, a stack of them (matrix_of), or groups of rows of a matrix.
enum class Matrices : int32_t { kOne, kStack, kGroups };

// What lies before a group.
struct GroupsBefore {
    int64_t rows;
    uint32_t data_blocks;  // of 16 rows
    uint32_t scale_atoms;  // of 128 rows
    uint32_t units;        // of work, one a thread block

    __device__ __forceinline__ void add(const GroupsBefore& more) {
        rows += more.rows;
        data_blocks += more.data_blocks;
        scale_atoms += more.scale_atoms;
        units += more.units;
    }
    __device__ __forceinline__ void subtract(const GroupsBefore& less) {
        rows -= less.rows;
        data_blocks -= less.data_blocks;
        scale_atoms -= less.scale_atoms;
        units -= less.units;
    }
    // As shuffles give it of another lane.
    template <typename Shuffle>
    __device__ __forceinline__ GroupsBefore shuffled(const Shuffle& shuffle) const {
        return {shuffle(rows), shuffle(data_blocks), shuffle(scale_atoms), shuffle(units)};
    }
    __device__ __forceinline__ GroupPlace place(int64_t group, int64_t group_rows) const {
        return {group, group_rows, rows, int64_t{kBlock} * data_blocks, int64_t{kAtomRows} * scale_atoms};
    }
};

struct GroupSearch {
    GroupsBefore all;  // groups; none where the splits are not valid
    bool valid;
    GroupPlace place;  // of the group that the block's unit belongs to, if it has one
    uint32_t unit;     // of the group's own

    __device__ __forceinline__ bool has_unit() const { return blockIdx.x < all.units; }
};

// units_of(rows) is how many blocks a group of so many rows takes; visit(place) is called once for every
// group, and find(place) for that of the block's unit. For all threads of a block, once.
template <typename UnitsOf, typename Visit, typename Find>
__device__ __forceinline__ const GroupSearch& search_groups(const GroupSplits& splits,
                                                            const UnitsOf& units_of, const Visit& visit,
                                                            const Find& find) {
    __shared__ GroupSearch search;
    if (warp_index() == 0) {
        const auto size_of_group = [&](int64_t rows) -> GroupsBefore {
            return {rows, static_cast<uint32_t>(ceil_div(rows, kBlock)),
                    static_cast<uint32_t>(ceil_div(rows, kAtomRows)), static_cast<uint32_t>(units_of(rows))};
        };
        const int share = static_cast<int>(ceil_div(splits.count, kLanes));
        const int begin = min(lane_index() * share, splits.count), end = min(begin + share, splits.count);
        GroupsBefore own{};
        bool possible = true;
        for (int group = begin; group < end; ++group) {
            const int64_t rows = splits.rows_of(group);
            possible = possible && rows >= 0;
            own.add(size_of_group(max(rows, int64_t{0})));
        }
        GroupsBefore at = own;
#pragma unroll
        for (int delta = 1; delta < kLanes; delta *= 2) {
            const GroupsBefore lower =
                at.shuffled([&](auto x) { return __shfl_up_sync(kAllLanes, x, delta); });
            if (lane_index() >= delta) at.add(lower);
        }
        const GroupsBefore all = at.shuffled([](auto x) { return __shfl_sync(kAllLanes, x, kLanes - 1); });
        const bool valid = __all_sync(kAllLanes, possible) && all.rows == splits.tokens;
        if (lane_index() == 0) search.all = valid ? all : GroupsBefore{}, search.valid = valid;
        at.subtract(own);
        if (!valid) at = {};
#pragma unroll 1
        for (int group = begin; group < end; ++group) {
            const GroupsBefore size = size_of_group(valid ? splits.rows_of(group) : 0);
            const GroupPlace place = at.place(group, size.rows);
            visit(place);
            if (blockIdx.x >= at.units && blockIdx.x - at.units < size.units) {
                search.place = place, search.unit = blockIdx.x - at.units;
                find(place);
            }
            at.add(size);
        }
    }
    __syncthreads();
    return search;
}

}  // namespace zerofp4::cuda
