#pragma once
// Words of global memory that many warps raise to the largest amax of all.

#include "common/bits.h"
#include "cuda/device/units.cuh"

namespace zerofp4::cuda {

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
