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
        load_words<false>(own + offset, words);
    }
    __device__ __forceinline__ void take(int64_t, Words& words, float (&values)[kCount]) const {
        unpack<G>(words, values);
#pragma unroll
        for (int k = 0; k < kCount; ++k) values[k] *= factor;
    }
    __device__ __forceinline__ float at(int64_t offset) const { return load_float(own[offset]) * factor; }
};

// Where this lane's elements are in the memory of each rank: in what this rank received, and its own.
template <typename G>
struct ReceivedRows {
    static constexpr int kAhead = 2;
    const G* own;
    const G* received;             // rank 0's
    const GradientPieces& pieces;  // in constant memory, not in registers

    __device__ __forceinline__ ReceivedRows(const GradientPieces& pieces, const AdamWStep& step,
                                            int64_t index, int64_t place)
        : own(in_global(static_cast<const G*>(step.gradient)) + index),
          received(in_global(static_cast<const G*>(pieces.received)) + place),
          pieces(pieces) {}

    __device__ __forceinline__ const G* of_rank(int r) const {
        return r == pieces.rank ? own : received + r * pieces.stride;
    }
    __device__ __forceinline__ bool are_aligned(int elements) const {
        const int bytes = elements * static_cast<int>(sizeof(G));
        return is_aligned(own, bytes) && is_aligned(received, bytes) && pieces.stride % elements == 0;
    }
};

// In the memory of the ranks themselves, this one's too. All begin at a vector's alignment.
template <typename G>
struct PeerRowsOf {
    static constexpr int kAhead = 2;
    const GradientPieces& pieces;
    int64_t place;

    __device__ __forceinline__ PeerRowsOf(const GradientPieces& pieces, const AdamWStep&, int64_t,
                                          int64_t place)
        : pieces(pieces), place(place) {}

    __device__ __forceinline__ const G* of_rank(int r) const {
        return in_global(static_cast<const G*>(pieces.rows.of[r])) + place;
    }
    __device__ __forceinline__ bool are_aligned(int elements) const { return place % elements == 0; }
};

// As GivenGradient, of the pieces that the ranks have brought. Without a factor, for which there is no
// register: gradients are clipped once they have been reduced.
template <typename G, int kCount, typename Rows>
struct MeanGradient {
    static constexpr int kAhead = Rows::kAhead;  // ranks whose vectors are loaded before the first is used
    static constexpr int kWords = kCount / kPerWord<G>;
    using Words = uint32_t[kAhead][kWords];
    const GradientPieces& pieces;
    const Rows rows;

    __device__ __forceinline__ MeanGradient(const AdamWTable& table, const AdamWDescriptor& tensor,
                                            const AdamWStep& step, int64_t index)
        : pieces(table.pieces),
          rows(table.pieces, step, index, (tensor.master - table.pieces.masters) + index) {}

    __device__ __forceinline__ bool has_vectors() const { return rows.are_aligned(kCount); }
    __device__ __forceinline__ void load(int64_t offset, Words& words) const {
#pragma unroll
        for (int r = 0; r < kAhead; ++r) {
            if (r < pieces.count) load_words<false>(rows.of_rank(r) + offset, words[r]);
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
            load_words<false>(rows.of_rank(r) + offset, words[0]);
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
        float sum = load_float(rows.of_rank(0)[offset]);
#pragma unroll 1
        for (int r = 1; r < pieces.count; ++r) sum += load_float(rows.of_rank(r)[offset]);
        return sum / static_cast<float>(pieces.count);
    }
};

template <typename G, int kCount>
using BroughtGradient = MeanGradient<G, kCount, ReceivedRows<G>>;
template <typename G, int kCount>
using PeerGradient = MeanGradient<G, kCount, PeerRowsOf<G>>;

}  // namespace zerofp4::cuda
