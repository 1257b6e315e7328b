#pragma once
// Reading masters: a warp takes a strip of 16 rows by 128 columns, each lane 4 neighbouring columns of every
// row. A scaling tile is then 4 neighbouring lanes. Half of the rows are loaded at a time, before the first
// is used.

#include "common/args/cast.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

constexpr int kStepRows = 8;
constexpr int kTileLanes = kBlock / kLaneColumns;
static_assert(kBlock % kStepRows == 0);

// Strips of a block. One that works on a list reads where in it it begins; more turns make up for that.
template <bool kSingle>
constexpr int kShareStrips = kSingle ? kWarps : kBlockStrips;

using StepValues = float[kStepRows][kLaneColumns];

// How the elements of a strip can be read: a vector per lane and row; two vectors, out of which the lane's
// elements are shifted, where they lie at another alignment; or one by one, only those that the shard owns.
enum class Access { kVector, kShifted, kMasked };

struct Strip {
    int64_t row;    // first row
    int64_t col;    // first column of this lane
    Access access;  // the same for all lanes

    __device__ __forceinline__ int64_t tile_row() const { return row / kBlock; }
    __device__ __forceinline__ int64_t tile_column() const { return col / kBlock; }
};

// Of the strip whose first element is (row, col).
__device__ __forceinline__ Access access_of(const WeightDescriptor& weight, int64_t row, int64_t col) {
    const int64_t first = row * weight.cols + col - weight.start;
    const int64_t end = first + (kBlock - 1) * weight.cols + kStripColumns;
    const bool inside = row + kBlock <= weight.rows && col + kStripColumns <= weight.cols;
    if (!inside || first < 0 || end > weight.numel) return Access::kMasked;
    const int vector = kLaneColumns * static_cast<int>(size_of(weight.master_dtype));
    const uintptr_t address = reinterpret_cast<uintptr_t>(weight.master) +
                              static_cast<uintptr_t>(first * size_of(weight.master_dtype));
    if (weight.cols % kLaneColumns == 0 && address % static_cast<uintptr_t>(vector) == 0)
        return Access::kVector;
    // The vectors reach up to one vector beyond the strip, on either side.
    return first < kLaneColumns || end + kLaneColumns > weight.numel ? Access::kMasked : Access::kShifted;
}

// The first element of a strip.
struct StripOrigin {
    int64_t row;
    int64_t col;
};

// 32-bit arithmetic: a weight has fewer than 2^32 strips, and a 64-bit division takes as long as ten loads.
template <int kColumns = kStripColumns>
__device__ __forceinline__ StripOrigin strip_at(const ShardGeometry& weight, int64_t unit) {
    const uint32_t local = static_cast<uint32_t>(unit - weight.strip_begin);
    const uint32_t chunks = static_cast<uint32_t>(weight.chunks);
    const uint32_t down = local / chunks;
    return {(weight.first_strip + down) * kBlock, (weight.first_chunk + (local - down * chunks)) * kColumns};
}

__device__ __forceinline__ Strip strip_of(const WeightDescriptor& weight, int64_t unit) {
    const auto [row, col] = strip_at(weight, unit);
    return {row, col + lane_index() * kLaneColumns, access_of(weight, row, col)};
}

// The lane's columns of a row that the shard owns: [begin, end) of 0..kLaneColumns.
struct LaneRange {
    int begin;
    int end;
    __device__ __forceinline__ bool has(int k) const { return begin <= k && k < end; }
};

// `index` is the lane's first column of the row, counted from the first owned element; a row before or past
// what is owned has none. The same columns as owned_columns gives, cut to the lane's.
__device__ __forceinline__ LaneRange lane_range(const ShardGeometry& weight, int64_t index, int64_t col) {
    const int existing = clamp_count(weight.cols - col, kLaneColumns);
    return {clamp_count(-index, kLaneColumns), clamp_count(weight.numel - index, existing)};
}

template <typename T, bool kLastUse>
__device__ __forceinline__ void load_step_as(const WeightDescriptor& weight, const Strip& strip, int64_t row,
                                             StepValues& values) {
    // A masked lane may begin before the shard or end past it: nothing there is read.
    const int64_t index = row * weight.cols + strip.col - weight.start;
    const T* master = in_global(static_cast<const T*>(weight.master));
    if (strip.access == Access::kVector) {
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
            uint32_t words[kLaneColumns / kPerWord<T>];
            load_words<kLastUse>(master + index + r * weight.cols, words);
            unpack<T>(words, values[r]);
        }
    } else if (strip.access == Access::kShifted) {
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
            uint32_t words[kLaneColumns / kPerWord<T>];
            load_shifted_words<T, kLastUse>(master + index + r * weight.cols, words);
            unpack<T>(words, values[r]);
        }
    } else {
#pragma unroll
        for (int r = 0; r < kStepRows; ++r) {
            const LaneRange owned = lane_range(weight, index + r * weight.cols, strip.col);
#pragma unroll
            for (int k = 0; k < kLaneColumns; ++k) {
                values[r][k] = owned.has(k) ? load_float(master[index + r * weight.cols + k]) : 0.0f;
            }
        }
    }
}

// Rows [row, row + kStepRows) of the lane's columns, as floats; 0 where the shard owns nothing.
template <bool kLastUse>
__device__ __forceinline__ void load_step(const WeightDescriptor& weight, const Strip& strip, int64_t row,
                                          StepValues& values) {
    with_dtype(weight.master_dtype,
               [&](auto t) { load_step_as<decltype(t), kLastUse>(weight, strip, row, values); });
}

template <typename T>
__device__ __forceinline__ void round_step_to(StepValues& values) {
#pragma unroll
    for (int r = 0; r < kStepRows; ++r) round_all<T>(values[r]);
}

__device__ __forceinline__ void round_step(DType dtype, StepValues& values) {
    if (dtype == DType::kBFloat16) round_step_to<BFloat16>(values);
    if (dtype == DType::kFloat16) round_step_to<Float16>(values);
}

}  // namespace zerofp4::cuda
