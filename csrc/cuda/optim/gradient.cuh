#pragma once
// Where an update finds a lane's gradients: in one array, or in an array of every rank, whose mean they are.
// What is loaded stays in words until it is needed, so that the loads of other arrays are on their way too.

#include "common/args/adamw.h"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// At a lane's first element of a strip, which a masked lane may not own.
template <typename G, int kCount>
struct GivenGradient {
    using Words = uint32_t[kCount / kPerWord<G>];
    const G* own;
    float factor;

    __device__ __forceinline__ GivenGradient(const AdamWTable&, const AdamWDescriptor&, const AdamWStep& step,
                                             int64_t index)
        : own(in_global(static_cast<const G*>(step.gradient)) + index), factor(step.factor) {}

    __device__ __forceinline__ bool has_vectors() const {
        return is_aligned(own, kCount * static_cast<int>(sizeof(G)));
    }
    __device__ __forceinline__ void load(int64_t offset, Words& words) const {
        load_words<true>(own + offset, words);
    }
    __device__ __forceinline__ void take(int64_t, Words& words, float (&values)[kCount]) const {
        unpack<G>(words, values);
#pragma unroll
        for (int k = 0; k < kCount; ++k) values[k] *= factor;
    }
    __device__ __forceinline__ float at(int64_t offset) const { return load_float(own[offset]) * factor; }
};

// As GivenGradient, of the pieces that the ranks have brought. Without a factor, for which there is no
// register: gradients are clipped once they have been reduced.
template <typename G, int kCount>
struct MeanGradient {
    static constexpr int kAhead = 2;  // ranks whose vectors are loaded before the first is used
    static constexpr int kWords = kCount / kPerWord<G>;
    using Words = uint32_t[kAhead][kWords];
    const G* own;
    const G* received;             // rank 0's, where this lane's elements are in the rows
    const GradientPieces& pieces;  // in constant memory, not in registers

    __device__ __forceinline__ MeanGradient(const AdamWTable& table, const AdamWDescriptor& tensor,
                                            const AdamWStep& step, int64_t index)
        : own(in_global(static_cast<const G*>(step.gradient)) + index),
          received(in_global(static_cast<const G*>(table.pieces.received)) +
                   (tensor.master - table.pieces.masters) + index),
          pieces(table.pieces) {}

    __device__ __forceinline__ const G* of_rank(int r) const {
        return r == pieces.rank ? own : received + r * pieces.stride;
    }
    __device__ __forceinline__ bool has_vectors() const {
        constexpr int kBytes = kCount * static_cast<int>(sizeof(G));
        return is_aligned(own, kBytes) && is_aligned(received, kBytes) && pieces.stride % kCount == 0;
    }
    __device__ __forceinline__ void load(int64_t offset, Words& words) const {
#pragma unroll
        for (int r = 0; r < kAhead; ++r) {
            if (r < pieces.count) load_words<true>(of_rank(r) + offset, words[r]);
        }
    }
    __device__ __forceinline__ void take(int64_t offset, Words& words, float (&values)[kCount]) const {
        unpack<G>(words[0], values);
#pragma unroll
        for (int r = 1; r < kAhead; ++r) {
            if (r < pieces.count) add(words[r], values);
        }
#pragma unroll 1
        for (int r = kAhead; r < pieces.count; ++r) {
            load_words<true>(of_rank(r) + offset, words[0]);
            add(words[0], values);
        }
        const float by = static_cast<float>(pieces.count);
#pragma unroll
        for (int k = 0; k < kCount; ++k) values[k] /= by;
    }
    __device__ __forceinline__ static void add(uint32_t (&words)[kWords], float (&values)[kCount]) {
        float brought[kCount];
        unpack<G>(words, brought);
#pragma unroll
        for (int k = 0; k < kCount; ++k) values[k] += brought[k];
    }
    __device__ __forceinline__ float at(int64_t offset) const {
        float sum = load_float(of_rank(0)[offset]);
#pragma unroll 1
        for (int r = 1; r < pieces.count; ++r) sum += load_float(of_rank(r)[offset]);
        return sum / static_cast<float>(pieces.count);
    }
};

}  // namespace zerofp4::cuda
