#pragma once
// Amaxes as words of the reduced vector.

#include "cuda/convert.cuh"
#include "cuda/strip.cuh"

namespace zerofp4::cuda {

// The amax of this lane's tile from the largest magnitude bits of each lane's elements. Rounding to the
// weight's dtype never reverses an order, so that rounding the largest magnitude is the same as taking the
// largest of rounded ones.
__device__ __forceinline__ float tile_amax_of(DType weight_dtype, uint32_t lane_bits) {
#pragma unroll
    for (int mask = 1; mask < kTileLanes; mask *= 2)
        lane_bits = max(lane_bits, __shfl_xor_sync(kAllLanes, lane_bits, mask));
    return round_one(weight_dtype, amax_of_bits(lane_bits));
}

// Raises a word of the reduced vector, none of which is negative: their bits sort like integers.
__device__ __forceinline__ void raise(float* word, float amax) {
    atomicMax(reinterpret_cast<int*>(word), static_cast<int>(to_bits(amax)));
}

// The group's word is shared by many warps: most find it high enough already and leave it alone.
__device__ __forceinline__ void raise_group(float* word, float lane_amax) {
    const uint32_t bits = __reduce_max_sync(kAllLanes, to_bits(lane_amax));
    if (lane_index() == 0 && bits > __ldcg(reinterpret_cast<const uint32_t*>(word)))
        raise(word, from_bits(bits));
}

}  // namespace zerofp4::cuda
