#pragma once
// What a lane has of a row of compact state: 16 neighbouring columns, which are those of a tile and of a
// block of random bytes, and a quarter of a group. And its elements one by one, where they cannot be read as
// vectors.

#include "common/compact.h"
#include "cuda/device/launch.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

constexpr int kColumns = 16;  // of a lane
constexpr int kRowLanes = kCompactStripColumns / kColumns;
constexpr int kGroupLanes = kStateGroup / kColumns;
constexpr int kRowGroups = kCompactStripColumns / kStateGroup;
constexpr int kRowsAtOnce = kLanes / kRowLanes;
static_assert(kColumns == kBlock, "a lane has the columns of a tile");
static_assert(kColumns == kRandomColumns && kRandomColumns == 1 << 4 && kStateGroup == 1 << 6);
static_assert(kRowsAtOnce == 2, "a warp has a pair of rows");

// Puts an element in front of a lane's, whose last one falls out; and the other way round.
template <typename T, int kWords>
__device__ __forceinline__ void push_front(uint32_t (&words)[kWords], uint32_t element) {
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = kWords - 1; i > 0; --i) words[i] = __funnelshift_lc(words[i - 1], words[i], kBits);
    words[0] = __funnelshift_lc(element << (32 - kBits), words[0], kBits);
}
template <typename T, int kWords>
__device__ __forceinline__ void pop_front(uint32_t (&words)[kWords]) {
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kWords - 1; ++i) words[i] = __funnelshift_rc(words[i], words[i + 1], kBits);
    words[kWords - 1] = __funnelshift_rc(words[kWords - 1], 0, kBits);
}

__device__ __forceinline__ uint32_t element_bits(float x) { return to_bits(x); }
__device__ __forceinline__ uint32_t element_bits(BFloat16 x) { return x.bits; }
__device__ __forceinline__ uint32_t element_bits(uint8_t x) { return x; }
__device__ __forceinline__ uint32_t element_bits(int8_t x) { return static_cast<uint8_t>(x); }
__device__ __forceinline__ void set_element(uint32_t bits, float& to) { to = from_bits(bits); }
__device__ __forceinline__ void set_element(uint32_t bits, BFloat16& to) {
    to.bits = static_cast<uint16_t>(bits);
}
__device__ __forceinline__ void set_element(uint32_t bits, uint8_t& to) { to = static_cast<uint8_t>(bits); }
__device__ __forceinline__ void set_element(uint32_t bits, int8_t& to) { to = static_cast<int8_t>(bits); }

// A lane's elements of a row, as vectors, or one by one: the first `count`.
struct Vectors {
    template <typename T, int kWords>
    static __device__ __forceinline__ void load(const T* p, int, uint32_t (&words)[kWords]) {
        load_words<false>(p, words);
    }
};
struct Elements {
    template <typename T, int kWords>
    static __device__ __forceinline__ void load(const T* p, int count, uint32_t (&words)[kWords]) {
#pragma unroll 1
        for (int k = kColumns - 1; k >= 0; --k) push_front<T>(words, k < count ? element_bits(p[k]) : 0u);
    }
    template <typename T, int kWords>
    static __device__ __forceinline__ void store(T* p, int count, uint32_t (&words)[kWords]) {
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
            set_element(words[0], p[k]);
            pop_front<T>(words);
        }
    }
};

}  // namespace zerofp4::cuda
