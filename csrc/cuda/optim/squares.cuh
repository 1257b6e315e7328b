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

// Adds sums of chunks to their words, a lane's `sum` each: most of a warp have the same word, which one lane
// then adds to. An addend has at most 31 bits, so that 32 times one of its halves fits into a register.
__device__ __forceinline__ void add_words(float sum, SquareSums& sums) {
    const SquareWord found = square_word(sum);
    const auto add = static_cast<uint32_t>(found.add);
    uint32_t rest = __ballot_sync(kAllLanes, add != 0);
    while (rest != 0) {
        const int word = __shfl_sync(kAllLanes, found.word, __ffs(static_cast<int>(rest)) - 1);
        const bool is_mine = found.word == word;
        const uint32_t low = __reduce_add_sync(kAllLanes, is_mine ? add & 0xffffu : 0u);
        const uint32_t high = __reduce_add_sync(kAllLanes, is_mine ? add >> 16 : 0u);
        if (lane_index() == 0) atomicAdd(&sums[word], low + (static_cast<unsigned long long>(high) << 16));
        rest &= ~__ballot_sync(kAllLanes, is_mine);
    }
}

// Of `kCount` chunks: this lane has the sum of its part of each, and `kLanesOfChunk` neighbouring lanes all.
// In each exchange a lane hands over half of its chunks, until it has one.
template <int kLanesOfChunk, int kCount>
__device__ __forceinline__ void add_chunks(float (&of_chunks)[kCount], SquareSums& sums) {
    static_assert(kCount <= kLanesOfChunk && (kCount & (kCount - 1)) == 0);
#pragma unroll
    for (int lanes = 1, count = kCount / 2; lanes < kLanesOfChunk; lanes *= 2, count /= 2) {
        if (count == 0) {
            of_chunks[0] += __shfl_xor_sync(kAllLanes, of_chunks[0], lanes);
        } else {
            const bool has_upper = (lane_index() & lanes) != 0;
#pragma unroll
            for (int k = 0; k < count; ++k) {
                const float given = has_upper ? of_chunks[k] : of_chunks[k + count];
                const float kept = has_upper ? of_chunks[k + count] : of_chunks[k];
                of_chunks[k] = kept + __shfl_xor_sync(kAllLanes, given, lanes);
            }
        }
    }
    const bool is_first = lane_index() % kLanesOfChunk < kCount;  // of the lanes that have the same sum
    add_words(is_first ? of_chunks[0] : 0.0f, sums);
}

// This lane's part of the chunk that its vector is in.
template <int kCount>
__device__ __forceinline__ float squares_of_vector(const float (&values)[kCount]) {
    float quads = quad_of_squares(values);
    if constexpr (kCount == 2 * kSquareQuad) quads += quad_of_squares(values + kSquareQuad);
    return quads;
}

// Of elements [begin, end), of any number; `begin` is that of a chunk. A warp takes a chunk. at: element i.
template <typename At>
__device__ __forceinline__ void add_elements(int64_t begin, int64_t end, SquareSums& sums, At at) {
    for (int64_t chunk = begin + warp_index() * kSquareChunk; chunk < end; chunk += kWarps * kSquareChunk) {
        const int64_t first = chunk + lane_index() * kSquareQuad;
        float values[kSquareQuad];
#pragma unroll
        for (int k = 0; k < kSquareQuad; ++k) values[k] = first + k < end ? at(first + k) : 0.0f;
        float of_chunk[] = {quad_of_squares(values)};
        add_chunks<kSquareChunk / kSquareQuad>(of_chunk, sums);
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
