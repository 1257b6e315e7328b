#pragma once
// Sums of squares in a thread block: those of chunks (common/squares.h) in its shared memory, from there to
// the words of all blocks.

#include "common/squares.h"
#include "cuda/device/units.cuh"

namespace zerofp4::cuda {

using SquareSums = unsigned long long[kSquareWords];

__device__ __forceinline__ void clear(SquareSums& sums) {
    if (threadIdx.x < kSquareWords) sums[threadIdx.x] = 0;
    __syncthreads();
}

// The sum of a chunk of which this lane has the quads next to each other, and `kLanesOfChunk` neighbouring
// lanes all.
template <int kLanesOfChunk>
__device__ __forceinline__ void add_chunk(float sum, SquareSums& sums) {
#pragma unroll
    for (int lanes = 1; lanes < kLanesOfChunk; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    if (lane_index() % kLanesOfChunk != 0 || sum == 0.0f) return;
    const SquareWord found = square_word(sum);
    atomicAdd(&sums[found.word], static_cast<unsigned long long>(found.add));
}

// Of a vector: this lane's, and its neighbours' of the same chunk.
template <int kCount>
__device__ __forceinline__ void add_vector(const float (&values)[kCount], SquareSums& sums) {
    float quads = quad_of_squares(values);
    if constexpr (kCount == 2 * kSquareQuad) quads += quad_of_squares(values + kSquareQuad);
    add_chunk<kSquareChunk / kCount>(quads, sums);
}

// Of elements [begin, end), of any number; `begin` is that of a chunk. A warp takes a chunk. at: element i.
template <typename At>
__device__ __forceinline__ void add_elements(int64_t begin, int64_t end, SquareSums& sums, At at) {
    for (int64_t chunk = begin + warp_index() * kSquareChunk; chunk < end; chunk += kWarps * kSquareChunk) {
        const int64_t first = chunk + lane_index() * kSquareQuad;
        float values[kSquareQuad];
#pragma unroll
        for (int k = 0; k < kSquareQuad; ++k) values[k] = first + k < end ? at(first + k) : 0.0f;
        add_chunk<kSquareChunk / kSquareQuad>(quad_of_squares(values), sums);
    }
}

// Once all threads have added theirs. squares: [kSquareCopies][kSquareWords].
__device__ __forceinline__ void add_to_all(const SquareSums& sums, uint64_t* squares) {
    __syncthreads();
    if (threadIdx.x < kSquareWords && sums[threadIdx.x] != 0) {
        uint64_t* copy = squares + (blockIdx.x % kSquareCopies) * kSquareWords;
        atomicAdd(reinterpret_cast<unsigned long long*>(copy + threadIdx.x), sums[threadIdx.x]);
    }
}

}  // namespace zerofp4::cuda
