#pragma once
// Which tile of which group of consecutive rows a thread block quantizes, and what belongs to no group.
// Neither the host nor the grid knows the splits: there are as many blocks as the worst of them need, and
// those that are left over clear what belongs to no group.

#include "common/args/grouped.h"
#include "cuda/device/groups.cuh"
#include "cuda/quantize/tile.cuh"

namespace zerofp4::cuda {

// Of a matrix, or of a group.
__host__ __device__ __forceinline__ int64_t tiles_of(int64_t rows, int64_t cols) {
    return ceil_div(rows, kTileRows) * ceil_div(cols, kTileCols);
}

__device__ __forceinline__ void store_place(const GroupedArgs& args, const GroupPlace& place) {
    const int64_t stride = args.splits.count + 1;
    args.offsets[place.group] = place.row;
    args.offsets[stride + place.group] = place.data_row;
    args.offsets[2 * stride + place.group] = place.scale_row;
}

__device__ __forceinline__ void store_given_amaxes(const QuantizeArgs& whole, int64_t count) {
    for (int64_t group = threadIdx.x; group < count; group += kThreads) {
        if (whole.stored_amax) whole.stored_amax[group] = whole.amax[group];
        if (whole.stored_columnwise_amax) whole.stored_columnwise_amax[group] = whole.columnwise_amax[group];
    }
}

// Zeros to bytes [begin, end) of a buffer that is not null, by `workers` threads. Not inlined: there are ten.
__device__ __noinline__ inline void clear(uint8_t* buffer, int64_t begin, int64_t end, int64_t worker,
                                          int64_t workers) {
#pragma unroll 1
    for (int64_t i = begin + 16 * worker; i < end; i += 16 * workers)
        store16(buffer + i, {0u, 0u, 0u, 0u}, clamp_count(end - i, 16));
}

// What follows the last group, by the blocks without a tile.
__device__ __forceinline__ void clear_rest(const GroupedArgs& args, const GroupsBefore& all) {
    const int64_t worker = static_cast<int64_t>(blockIdx.x - all.units) * kThreads + threadIdx.x;
    const int64_t workers = static_cast<int64_t>(gridDim.x - all.units) * kThreads;
    const GroupPlace end = all.place(args.splits.count, 0);
    const int64_t data_rows = most_data_rows(args.splits), scale_rows = most_scale_rows(args.splits);
    visit_buffers(args.whole, [&](uint8_t* buffer, int64_t bytes, bool padded) {
        const int64_t used = padded ? end.scale_row : end.data_row, most = padded ? scale_rows : data_rows;
        if (buffer) clear(buffer, used / kBlock * bytes, most / kBlock * bytes, worker, workers);
    });
}

// What lies between the padded columnwise scales of this group and those of the next, by the blocks of its
// first tiles.
__device__ __forceinline__ void clear_gap(const QuantizeArgs& group, const GroupPlace& place, uint32_t tile) {
    const uint32_t across = static_cast<uint32_t>(ceil_div(group.cols, kTileCols));
    if (tile >= across) return;
    const ScaleGap gap = columnwise_gap(place, group.cols);
    const int64_t worker = static_cast<int64_t>(tile) * kThreads + threadIdx.x;
    const int64_t workers = static_cast<int64_t>(across) * kThreads;
#pragma unroll
    for (int layout = kExpanded; layout <= kSwizzled; ++layout) {
        uint8_t* buffer = group.columnwise_scale[layout];
        if (buffer) clear(buffer, gap.begin, gap.end, worker, workers);
    }
}

// The block's tile of a group, which is left in `own`; groups without rows and blocks that are left over have
// none.
template <Columns kColumns>
__device__ __forceinline__ TilePlace tile_of_groups(const GroupedArgs& args, OwnMatrix& own) {
    const auto tiles_of_rows = [&](int64_t rows) { return tiles_of(rows, args.whole.cols); };
    const auto visit = [&](const GroupPlace& place) {
        if (blockIdx.x == 0) store_place(args, place);
    };
    const auto find = [&](const GroupPlace& place) { own = {arguments_of(args.whole, place), place.rows}; };
    const GroupSearch& search = search_groups(args.splits, tiles_of_rows, visit, find);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            store_place(args, search.all.place(args.splits.count, 0));
            *args.error = search.valid ? 0 : 1;
        }
        store_given_amaxes(args.whole, args.splits.count);
    }
    if (!search.has_unit()) {
        clear_rest(args, search.all);
        return {};
    }
    if constexpr (kColumns != Columns::kNone) clear_gap(own.args, search.place, search.unit);
    // Down the rows for the sake of the columnwise copy.
    const uint32_t length =
        static_cast<uint32_t>(kColumns == Columns::kNone ? ceil_div(args.whole.cols, kTileCols)
                                                         : ceil_div(own.args.rows, kTileRows));
    const uint32_t line = in_uniform_register(search.unit / length),
                   step = in_uniform_register(search.unit % length);
    return kColumns == Columns::kNone ? TilePlace{line, step, true} : TilePlace{step, line, true};
}

inline dim3 group_blocks(const GroupedArgs& args) {
    // Every group may begin a tile more; one row of tiles more, so that some block has none.
    const int64_t down = args.whole.rows / kTileRows + args.splits.count + 1;
    return dim3(grid_size("quantize", down * std::max<int64_t>(1, ceil_div(args.whole.cols, kTileCols))));
}

}  // namespace zerofp4::cuda
