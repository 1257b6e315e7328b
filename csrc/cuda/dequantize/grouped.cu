// The values of groups of rows. A warp has 16 rows by 256 columns of output; groups are found from where they
// begin, which quantization has left on the device.

#include "common/args/grouped_values.h"
#include "cuda/dequantize/rows.cuh"
#include "cuda/device/tuning.cuh"

namespace zerofp4::cuda {
namespace {

constexpr int kPieceColumns = kWarpBytes / static_cast<int>(sizeof(BFloat16));
constexpr int kLaneValues = kVector<BFloat16>;

__device__ __forceinline__ void store_ends(const GroupedValuesArgs& args) {
    for (int64_t group = threadIdx.x; group < args.count; group += kThreads)
        args.ends[group] = end_of_group(args, group);
}

// The last of `length` groups that begins at or before a place, which is the one that holds it: empty ones
// begin where the next one does. A search in which every lane probes.
__device__ __forceinline__ int64_t find_group(const int64_t* begins, int64_t length, int64_t place) {
    int64_t first = 0;
    while (length > 1) {
        const int64_t step = ceil_div(length, kLanes);
        const int64_t probe = lane_index() * step;
        const bool begun = probe < length && begins[first + probe] <= place;
        const int64_t passed = (__popc(__ballot_sync(kAllLanes, begun)) - 1) * step;
        first += passed;
        length = min(step, length - passed);
    }
    return first;
}

// The lane's columns from `col` of a group's lines on, `row` lines down.
__device__ __forceinline__ LaneRows lane_rows(GroupLines lines, int64_t row, int64_t col) {
    lines.move(row, col);
    return {lines.data,
            lines.scale,
            reinterpret_cast<uint8_t*>(lines.output),
            static_cast<uint32_t>(lines.data_pitch),
            static_cast<uint32_t>(lines.scale_pitch),
            static_cast<uint64_t>(lines.pitch) * sizeof(BFloat16),
            lines.amax,
            decode_factor(kE4M3Max)};
}

// Of up to 16 rows from `row` on, which several groups may share.
__device__ __forceinline__ void decode_across(const GroupedValuesArgs& args, int64_t row, int64_t col) {
    int64_t group = *args.error ? 0 : find_group(args.begins(), args.places(), row);
    GroupLines lines = lines_of(args, group);
    if (row + kWarpRows <= lines.end)
        return decode_rows<BFloat16, kWarpRows>(lane_rows(lines, row - lines.begin, col));
    const int64_t stop = min(row + kWarpRows, args.tokens);
    while (true) {
        const int64_t count = min(stop, lines.end) - row;
        if (count > 0) {
            const LaneRows own = lane_rows(lines, row - lines.begin, col);
            decode_some_rows<BFloat16>(own, static_cast<int>(count));
            row += count;
        }
        if (row >= stop || ++group >= args.count) return;
        lines = lines_of(args, group);
    }
}

// The same of a columnwise copy: each lane's columns are those of one group, of 16 rows or of all that there
// are.
__device__ __forceinline__ void decode_along(const GroupedValuesArgs& args, int64_t row, int64_t col,
                                             int64_t first_col) {
    int64_t group = 0;
    if (!*args.error) {
        group = find_group(args.begins(), args.places(), first_col);
        while (group < args.count && col >= args.begins()[group + 1]) ++group;
    }
    const GroupLines lines = lines_of(args, group);
    const LaneRows own = lane_rows(lines, row, col - lines.begin);
    if (row + kWarpRows <= args.cols) {
        decode_rows<BFloat16, kWarpRows>(own);
    } else {
        decode_some_rows<BFloat16>(own, static_cast<int>(args.cols - row));
    }
}

template <bool kColumnwise>
__global__ void __launch_bounds__(kThreads, kTuning.group_values_blocks)
    grouped_values_kernel(const __grid_constant__ GroupedValuesArgs args, uint32_t across) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0) store_ends(args);
    const uint32_t piece = static_cast<uint32_t>(grid_warp()), down = piece / across;
    const int64_t row = int64_t{down} * kWarpRows;
    if (row >= args.rows() || args.width() == 0) return;
    const int64_t first_col = int64_t{piece - down * across} * kPieceColumns;
    // Lanes without columns do what the last one does.
    const int64_t col = min(first_col + lane_index() * kLaneValues, args.width() - kLaneValues);
    if constexpr (kColumnwise) {
        decode_along(args, row, col, first_col);
    } else {
        decode_across(args, row, col);
    }
}

}  // namespace

void grouped_values(const GroupedValuesArgs& args, cudaStream_t stream) {
    const auto kernel = args.columnwise ? grouped_values_kernel<true> : grouped_values_kernel<false>;
    const int64_t across = std::max<int64_t>(1, ceil_div(args.width(), kPieceColumns));
    const int64_t pieces = ceil_div(args.rows(), kWarpRows) * across;
    const int64_t blocks = std::max<int64_t>(1, ceil_div(pieces, kWarps));
    launch("grouped_values", kernel, blocks, stream, args, static_cast<uint32_t>(across));
}

}  // namespace zerofp4::cuda
