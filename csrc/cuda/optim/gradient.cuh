#pragma once
// Where an update finds a lane's gradients: in one array, or in an array of every rank, whose mean they are.
// What is loaded stays in words until it is needed, so that the loads of other arrays are on their way too.

#include "common/adamw.h"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

// Where load_words takes elements from: at 16 bytes if there are several vectors, too.
template <typename G>
__device__ __forceinline__ int alignment_of(int elements) {
    return min(16, elements * static_cast<int>(sizeof(G)));
}

// At a lane's first element of a row, which a masked lane may not own.
template <typename G, int kCount>
struct GivenGradient {
    using Words = uint32_t[kCount / kPerWord<G>];
    using Element = G;
    static constexpr bool kIsOneArray = true;
    const G* own;
    float factor;

    __device__ __forceinline__ GivenGradient(const AdamWTable&, const AdamWDescriptor&, const AdamWStep& step,
                                             int64_t index)
        : own(in_global(static_cast<const G*>(step.gradient)) + index), factor(step.factor) {}

    __device__ __forceinline__ void advance(int64_t elements) { own += elements; }
    __device__ __forceinline__ bool has_vectors() const { return is_aligned(own, alignment_of<G>(kCount)); }
    __device__ __forceinline__ void load(int64_t offset, Words& words) const {
        load_words<false>(own + offset, words);
    }
    __device__ __forceinline__ void take(int64_t, Words& words, float (&values)[kCount]) const {
        unpack<G>(words, values);
        if (factor == 1.0f) return;
#pragma unroll
        for (int k = 0; k < kCount; ++k) values[k] *= factor;
    }
    __device__ __forceinline__ float at(int64_t offset) const { return load_float(own[offset]) * factor; }
};

// Where this lane's elements are in the memory of each rank: in what this rank received, and its own.
template <typename G>
struct ReceivedRows {
    const G* own;
    const G* received;             // rank 0's
    const GradientPieces& pieces;  // in constant memory, not in registers

    __device__ __forceinline__ ReceivedRows(const GradientPieces& pieces, const AdamWStep& step,
                                            int64_t index, int64_t place)
        : own(in_global(static_cast<const G*>(step.gradient)) + index),
          received(in_global(static_cast<const G*>(pieces.received)) + place),
          pieces(pieces) {}

    __device__ __forceinline__ void advance(int64_t elements) { own += elements, received += elements; }
    __device__ __forceinline__ const G* of_rank(int r) const {
        return r == pieces.rank ? own : received + r * pieces.stride;
    }
    __device__ __forceinline__ bool are_aligned(int elements) const {
        const int bytes = alignment_of<G>(elements);
        return is_aligned(own, bytes) && is_aligned(received, bytes) &&
               pieces.stride * sizeof(G) % bytes == 0;
    }
};

// In the memory of the ranks themselves, this one's too. All begin at a vector's alignment.
template <typename G>
struct PeerRowsOf {
    const GradientPieces& pieces;
    int64_t place;

    __device__ __forceinline__ PeerRowsOf(const GradientPieces& pieces, const AdamWStep&, int64_t,
                                          int64_t place)
        : pieces(pieces), place(place) {}

    __device__ __forceinline__ void advance(int64_t elements) { place += elements; }
    __device__ __forceinline__ const G* of_rank(int r) const {
        return in_global(static_cast<const G*>(pieces.rows.of[r])) + place;
    }
    __device__ __forceinline__ bool are_aligned(int elements) const {
        return place * sizeof(G) % alignment_of<G>(elements) == 0;
    }
};

// As GivenGradient, of the pieces that the ranks have brought. Without a factor, for which there is no
// register: gradients are clipped once they have been reduced.
template <typename G, int kCount, typename Rows>
class MeanGradient {
  public:
    static constexpr int kWords = kCount / kPerWord<G>;
    // Ranks whose vectors are loaded before the first is used: more would not fit into registers.
    static constexpr int kAhead = kWords > 8 ? 1 : 2;
    using Words = uint32_t[kAhead][kWords];
    using Element = G;
    static constexpr bool kIsOneArray = false;

    __device__ __forceinline__ MeanGradient(const AdamWTable& table, const AdamWDescriptor& tensor,
                                            const AdamWStep& step, int64_t index)
        : pieces(table.pieces),
          sign(step.maximize ? -1.0f : 1.0f),
          rows(table.pieces, step, index, place_in_rows(table.pieces, tensor) + index) {}

    __device__ __forceinline__ void advance(int64_t elements) { rows.advance(elements); }
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
        if ((pieces.count & (pieces.count - 1)) == 0) {
            const float share = sign * static_cast<float>(pieces.share);
#pragma unroll
            for (int k = 0; k < kCount; ++k) values[k] *= share;
        } else {
#pragma unroll
            for (int k = 0; k < kCount; ++k) values[k] = divided(values[k]);
        }
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
        return divided(sum);
    }

  private:
    // sum / count, correctly rounded, without the slow path of a division: in double it is exact where it is
    // half way between two floats. An infinity has no remainder, and none of 0 is added: -0 would lose its
    // sign.
    __device__ __forceinline__ float divided(float sum) const {
        const double count = pieces.count, quotient = sum * pieces.share;
        const double rest = fma(-quotient, count, static_cast<double>(sum));
        return sign * static_cast<float>(fabs(rest) > 0.0 ? fma(rest, pieces.share, quotient) : quotient);
    }

    const GradientPieces& pieces;
    const float sign;
    Rows rows;
};

template <typename G, int kCount>
using BroughtGradient = MeanGradient<G, kCount, ReceivedRows<G>>;
template <typename G, int kCount>
using PeerGradient = MeanGradient<G, kCount, PeerRowsOf<G>>;

}  // namespace zerofp4::cuda
