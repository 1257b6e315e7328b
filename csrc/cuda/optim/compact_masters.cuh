#pragma once
// A lane's masters of a row of compact state, float32 or split into 16 and 8 bits: from what is stored to
// floats and back, rounded without a bias (common/compact.h).

#include "cuda/format/magnitudes.cuh"
#include "cuda/format/nibbles.cuh"
#include "cuda/optim/row_ring.cuh"

namespace zerofp4::cuda {

constexpr int kMastersAtOnce = 8;  // those of all columns would not fit into registers

// The larger magnitude; NaN if one is.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
    return larger;
}

// Byte kByte of each of four words.
template <int kByte>
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr unsigned kPair = kByte | (4 + kByte) << 4;
    return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

template <typename Masters>
__device__ __forceinline__ float most_of(const Masters& masters) {
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) most = larger_magnitude(most, masters.at(k));
    return most;
}

// A lane's masters of a row, as they are stored.
struct FloatMasters {
    static constexpr bool kIsSplit = false;
    // Where a pair of rows begins.
    struct Arrays {
        float* master;

        __device__ __forceinline__ Arrays(const AdamWDescriptor& tensor, int64_t index)
            : master(uniform(tensor.master + index)) {}
        __device__ __forceinline__ void advance(int64_t elements) { master += elements; }
    };
    struct Staged {
        StagedPair<float> words;

        __device__ __forceinline__ void request(const Arrays& from, const StripShape& shape) {
            words.request(from.master, shape);
        }
    };
    uint32_t words[kColumns];

    template <typename Access>
    __device__ __forceinline__ void load(const AdamWDescriptor& tensor, int64_t index, int count) {
        Access::load(in_global(tensor.master) + index, count, words);
    }
    __device__ __forceinline__ void store_elements(const AdamWDescriptor& tensor, int64_t index, int count) {
        Elements::store(in_global(tensor.master) + index, count, words);
    }
    __device__ __forceinline__ void take(const Staged& staged) { staged.words.take(words); }
    __device__ __forceinline__ void store(Staged& staged, const Arrays& to, const StripShape& shape) const {
        staged.words.store(to.master, shape, words);
    }
    __device__ __forceinline__ float at(int k) const { return from_bits(words[k]); }
    __device__ __forceinline__ float quick_at(int k) const { return at(k); }
    // Takes elements from `first` on.
    __device__ __forceinline__ void set(int first, const float (&values)[kMastersAtOnce],
                                        const RandomBytes&) {
#pragma unroll
        for (int i = 0; i < kMastersAtOnce; ++i) words[first + i] = to_bits(values[i]);
    }
    // The largest magnitude, of which the bits that matter to a weight of this dtype are right.
    __device__ __forceinline__ float most(DType) const { return most_of(*this); }
};

struct SplitMasters {
    static constexpr bool kIsSplit = true;
    struct Arrays {
        BFloat16* high;
        uint8_t* low;

        __device__ __forceinline__ Arrays(const AdamWDescriptor& tensor, int64_t index)
            : high(uniform(tensor.compact.high + index)), low(uniform(tensor.compact.low + index)) {}
        __device__ __forceinline__ void advance(int64_t elements) { high += elements, low += elements; }
    };
    struct Staged {
        StagedPair<BFloat16> high;
        StagedPair<uint8_t> low;

        __device__ __forceinline__ void request(const Arrays& from, const StripShape& shape) {
            high.request(from.high, shape);
            low.request(from.low, shape);
        }
    };
    uint32_t high[kColumns / 2];
    uint32_t low[kColumns / 4];

    template <typename Access>
    __device__ __forceinline__ void load(const AdamWDescriptor& tensor, int64_t index, int count) {
        Access::load(in_global(tensor.compact.high) + index, count, high);
        if (tensor.compact.low != nullptr)
            return Access::load(in_global(tensor.compact.low) + index, count, low);
#pragma unroll
        for (uint32_t& word : low) word = 0;  // where there is no state yet
    }
    __device__ __forceinline__ void store_elements(const AdamWDescriptor& tensor, int64_t index, int count) {
        Elements::store(in_global(tensor.compact.high) + index, count, high);
        Elements::store(in_global(tensor.compact.low) + index, count, low);
    }
    __device__ __forceinline__ void take(const Staged& staged) {
        staged.high.take(high);
        staged.low.take(low);
    }
    __device__ __forceinline__ void store(Staged& staged, const Arrays& to, const StripShape& shape) const {
        staged.high.store(to.high, shape, high);
        staged.low.store(to.low, shape, low);
    }
    // join_master. Counted from -128 on the low byte lies behind the magnitude of the high part.
    __device__ __forceinline__ float at(int k) const {
        const uint32_t magnitude = high[k / 2] & (k % 2 == 0 ? 0x00007fffu : 0x7fff0000u);
        const uint32_t from_least =
            __byte_perm(magnitude, low[k / 4] ^ 0x80808080u, (k % 2 == 0 ? 0x1042 : 0x3240) + k % 4 * 16);
        const int32_t joined = max(static_cast<int32_t>(from_least) - 0x8000, 0);
        const uint32_t sign = (k % 2 == 0 ? high[k / 2] << 16 : high[k / 2]) & 0x80000000u;
        return from_bits(static_cast<uint32_t>(joined) | sign);
    }
    // join_master in half of the instructions, but a NaN if the high part is zero and the low byte negative.
    __device__ __forceinline__ float quick_at(int k) const {
        const uint32_t steps = permute(low[k / 4], 0u, 0x8804u + 0x1110u * (k % 4));
        return from_bits((k % 2 == 0 ? high[k / 2] << 16 : high[k / 2] & 0xffff0000u) + steps);
    }
    // round_master of each, of which none is NaN but 0x7fc00000.
    __device__ __forceinline__ void set(int first, const float (&values)[kMastersAtOnce],
                                        const RandomBytes& random) {
#pragma unroll
        for (int i = 0; i < kMastersAtOnce; i += 4) {
            const float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
            set_four(first + i, four, random.words[(first + i) / 4]);
        }
    }
    // The high parts are what the masters are when rounded to bfloat16.
    __device__ __forceinline__ float most(DType weight_dtype) const {
        if (weight_dtype != DType::kBFloat16) return most_of(*this);
        uint32_t most = high[0];
#pragma unroll
        for (uint32_t word : high) most = larger_magnitudes<BFloat16>(most, word);
        most = magnitudes<BFloat16>(most);
        return from_bits(widened<BFloat16>(max(most & 0xffffu, most >> 16)));
    }

  private:
    // 0x8000 more round the high part, and have the low byte count from -128. For an odd random byte the sum
    // is a step less: if the low byte was 0 it is 0xff now, below a smaller high part. All others get the
    // step back.
    __device__ __forceinline__ void set_four(int k, const float (&values)[4], uint32_t random) {
        const uint32_t odd = random & 0x01010101u, odd_signs = random << 7;
        uint32_t bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            bits[i] = to_bits(values[i]) + permute(random, odd_signs, 0xccc0u + 0x1111u * i) + 0x8000u;
        high[k / 2] = __byte_perm(bits[0], bits[1], 0x7632);
        high[k / 2 + 1] = __byte_perm(bits[2], bits[3], 0x7632);
        // Inverted if odd, so that it is always a 0 that is treated otherwise.
        const uint32_t inverted = permute<0xba98>(odd_signs, 0u);
        const uint32_t bytes = pack_bytes<1>(bits[0], bits[1], bits[2], bits[3]) ^ inverted;
        // 1 where a byte is 0, and perhaps where one is 1.
        const uint32_t zeros = ((bytes - 0x01010101u) & ~bytes & 0x80808080u) >> 7;
        low[k / 4] = ((bytes | zeros) - odd) ^ inverted ^ 0x80808080u;
    }
};

}  // namespace zerofp4::cuda
