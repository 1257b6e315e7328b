#pragma once
// Which group a thread block works on, found by every block from the splits in device memory: a prefix sum
// over all groups, of which each thread takes a few consecutive ones.

#include "common/grouped.h"
#include "cuda/units.cuh"

namespace zerofp4::cuda {

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
    __device__ __forceinline__ GroupsBefore of_lane_below(int delta) const {
        return {__shfl_up_sync(kAllLanes, rows, delta), __shfl_up_sync(kAllLanes, data_blocks, delta),
                __shfl_up_sync(kAllLanes, scale_atoms, delta), __shfl_up_sync(kAllLanes, units, delta)};
    }
    __device__ __forceinline__ GroupPlace place(int64_t group, int64_t group_rows) const {
        return {group, group_rows, rows, int64_t{kBlock} * data_blocks, int64_t{kAtomRows} * scale_atoms};
    }
};

struct BlockGroup {
    GroupPlace place;
    uint32_t unit;  // of the group's own
};

struct GroupScan {
    int64_t begin, end;   // the groups of this thread
    GroupsBefore before;  // these
    GroupsBefore all;     // groups; none where the splits are not valid
    bool valid;

    // Of every group of this thread: visit(place, what lies before it, its units).
    template <typename UnitsOf, typename Visit>
    __device__ __forceinline__ void visit_groups(const GroupSplits& splits, const UnitsOf& units_of,
                                                 const Visit& visit) const {
        GroupsBefore at = before;
        for (int64_t group = begin; group < end; ++group) {
            const int64_t rows = valid ? splits.rows_of(group) : 0;
            const GroupsBefore own = group_size(rows, units_of);
            visit(at.place(group, rows), at.units, own.units);
            at.add(own);
        }
    }

    template <typename UnitsOf>
    static __device__ __forceinline__ GroupsBefore group_size(int64_t rows, const UnitsOf& units_of) {
        return {rows, static_cast<uint32_t>(ceil_div(rows, kBlock)),
                static_cast<uint32_t>(ceil_div(rows, kAtomRows)), static_cast<uint32_t>(units_of(rows))};
    }
};

// units_of(rows) is how many blocks a group of so many rows takes. For all threads of a block, once.
template <typename UnitsOf>
__device__ __forceinline__ GroupScan scan_groups(const GroupSplits& splits, const UnitsOf& units_of) {
    __shared__ GroupsBefore warps[kWarps];
    GroupScan scan{};
    const int64_t share = ceil_div(splits.count, kThreads);
    scan.begin = min(static_cast<int64_t>(threadIdx.x) * share, static_cast<int64_t>(splits.count));
    scan.end = min(scan.begin + share, static_cast<int64_t>(splits.count));
    GroupsBefore own{};
    bool possible = true;
    for (int64_t group = scan.begin; group < scan.end; ++group) {
        const int64_t rows = splits.rows_of(group);
        possible = possible && rows >= 0;
        own.add(GroupScan::group_size(max(rows, int64_t{0}), units_of));
    }
    GroupsBefore through = own;
#pragma unroll
    for (int delta = 1; delta < kLanes; delta *= 2) {
        const GroupsBefore lower = through.of_lane_below(delta);
        if (lane_index() >= delta) through.add(lower);
    }
    if (lane_index() == kLanes - 1) warps[warp_index()] = through;
    possible = __syncthreads_and(possible);
    through.subtract(own);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        if (warp == warp_index()) through.add(scan.all);
        scan.all.add(warps[warp]);
    }
    scan.valid = possible && scan.all.rows == splits.tokens;
    if (scan.valid) {
        scan.before = through;
    } else {
        scan.all = {};
    }
    return scan;
}

// The group that this block's unit belongs to; the block has one where blockIdx.x < scan.all.units. For all
// threads of a block, once.
template <typename UnitsOf>
__device__ __forceinline__ const BlockGroup& group_of_block(const GroupSplits& splits, const GroupScan& scan,
                                                            const UnitsOf& units_of) {
    __shared__ BlockGroup found;
    scan.visit_groups(splits, units_of, [&](const GroupPlace& place, uint32_t first, uint32_t units) {
        if (blockIdx.x >= first && blockIdx.x - first < units) found = {place, blockIdx.x - first};
    });
    __syncthreads();
    return found;
}

}  // namespace zerofp4::cuda
