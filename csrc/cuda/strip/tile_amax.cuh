#pragma once
// Amaxes of tiles, from the lanes that have read a strip to the reduced vector.

#include "cuda/device/raise.cuh"
#include "cuda/format/magnitudes.cuh"
#include "cuda/strip/master_strip.cuh"

namespace zerofp4::cuda {

// The largest bits of this lane's group of so many lanes.
template <int kCount>
__device__ __forceinline__ uint32_t most_of_lanes(uint32_t lane_bits) {
#pragma unroll
    for (int mask = 1; mask < kCount; mask *= 2)
        lane_bits = max(lane_bits, __shfl_xor_sync(kAllLanes, lane_bits, mask));
    return lane_bits;
}

// The amax of this lane's tile from the largest magnitude bits of each lane's elements. Rounding to the
// weight's dtype never reverses an order, so that rounding the largest magnitude is the same as taking the
// largest of rounded ones.
__device__ __forceinline__ float tile_amax_of(DType weight_dtype, uint32_t lane_bits) {
    return round_to(weight_dtype, amax_of_bits(most_of_lanes<kTileLanes>(lane_bits)));
}

// Writes the amax of this lane's tile of a strip that starts in `row`; `lane_col` is the lane's first column.
// A tile of which nothing is owned, past the last column too, has 0 and is not touched. All that this rank
// owns of a tile is in one strip, so that nobody else writes there.
__device__ __forceinline__ void publish_tile(float* reduced, const ShardGeometry& weight, int64_t row,
                                             int64_t lane_col, float amax) {
    if (lane_index() % kTileLanes == 0 && amax > 0.0f) {
        const int64_t tile = row / kBlock * ceil_div(weight.cols, kBlock) + lane_col / kBlock;
        reduced[weight.tile_offset + tile] = amax;
    }
}

// Raises the words of a weight that have the amax of all that is owned.
__device__ __forceinline__ void raise_words(float* reduced, const ShardGeometry& weight, float lane_amax) {
    raise_group(reduced + weight.amax_offset, lane_amax);
    if (weight.own_offset >= 0) raise_group(reduced + weight.own_offset, lane_amax);
}

}  // namespace zerofp4::cuda
