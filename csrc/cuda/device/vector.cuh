#pragma once
// Vector loads and stores, their fallbacks for what is unaligned or cut off, and elements packed in 32-bit
// words.

#include <type_traits>

#include "common/dtype.h"

namespace zerofp4::cuda {

__host__ __device__ __forceinline__ bool is_aligned(const void* p, int bytes) {
    return (reinterpret_cast<uintptr_t>(p) & static_cast<uintptr_t>(bytes - 1)) == 0;
}

// n as an int in [0, limit].
__device__ __forceinline__ int clamp_count(int64_t n, int limit) {
    return static_cast<int>(n < 0 ? 0 : n < limit ? n : limit);
}

// The first `count` bytes at p, at most 4, the others zero. One access when all are there and the address
// allows.
__device__ __forceinline__ uint32_t load4(const uint8_t* p, int count) {
    if (count >= 4 && is_aligned(p, 4)) return *reinterpret_cast<const uint32_t*>(p);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i < count) word |= static_cast<uint32_t>(p[i]) << (8 * i);
    }
    return word;
}

__device__ __forceinline__ void store4(uint8_t* p, uint32_t word, int count) {
    if (count >= 4 && is_aligned(p, 4)) {
        *reinterpret_cast<uint32_t*>(p) = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i < count) p[i] = static_cast<uint8_t>(word >> (8 * i));
    }
}

__device__ __forceinline__ void store8(uint8_t* p, const uint32_t (&words)[2], int count) {
    if (count >= 8 && is_aligned(p, 8)) {
        *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
        return;
    }
    store4(p, words[0], count);
    store4(p + 4, words[1], count - 4);
}

__device__ __forceinline__ void load16(const uint8_t* p, int count, uint32_t (&words)[4]) {
    if (count >= 16 && is_aligned(p, 16)) {
        const uint4 x = *reinterpret_cast<const uint4*>(p);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = load4(p + 4 * i, count - 4 * i);
}

__device__ __forceinline__ void store16(uint8_t* p, const uint32_t (&words)[4], int count) {
    if (count >= 16 && is_aligned(p, 16)) {
        *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) store4(p + 4 * i, words[i], count - 4 * i);
}

// The 32-bit words at an address aligned for vectors: 16 bytes an access, or 8 for two words. kLastUse marks
// data that nobody reads soon after, so that it leaves the L2 cache first.
template <bool kLastUse, int kWords>
__device__ __forceinline__ void load_words(const void* p, uint32_t (&words)[kWords]) {
    if constexpr (kWords == 2) {
        const uint2* from = static_cast<const uint2*>(p);
        const uint2 x = kLastUse ? __ldcs(from) : *from;
        words[0] = x.x, words[1] = x.y;
    } else {
        static_assert(kWords % 4 == 0, "whole 16-byte vectors");
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4* from = static_cast<const uint4*>(p) + i / 4;
            const uint4 x = kLastUse ? __ldcs(from) : *from;
            words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
        }
    }
}

// Begins to fetch a line to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Half of the words, those from byte `shift` of them on, which is in their first half and a multiple of
// kElement.
template <int kElement, int kWords>
__device__ __forceinline__ void shift_words(uint32_t (&both)[2 * kWords], uint32_t shift,
                                            uint32_t (&words)[kWords]) {
#pragma unroll
    for (int distance = kWords / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i + distance < 2 * kWords; ++i) {
            both[i] = (shift & (4 * distance)) != 0 ? both[i + distance] : both[i];
        }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        words[i] = kElement == 4 ? both[i] : __funnelshift_r(both[i], both[i + 1], shift % 4 * 8);
    }
}

// Begins to copy to shared memory: zeros in place of what does not exist, of which nothing is read.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool exists) {
    static_assert(kBytes == 8 || kBytes == 16);
    const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = exists ? kBytes : 0;
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(global), "r"(bytes)
                     : "memory");
    }
}
// Those that this lane has begun since the last commit are one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups but the last kLeft are there: for this lane, and for its warp behind a __syncwarp().
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// The same as load_words for elements T at any address: two aligned vectors, shifted. Both must be readable.
template <typename T, bool kLastUse, int kWords>
__device__ __forceinline__ void load_shifted_words(const T* p, uint32_t (&words)[kWords]) {
    const uint32_t shift = reinterpret_cast<uintptr_t>(p) % (4 * kWords);
    const uint8_t* aligned = reinterpret_cast<const uint8_t*>(p) - shift;
    uint32_t low[kWords], high[kWords], both[2 * kWords];
    load_words<kLastUse>(aligned, low);
    load_words<kLastUse>(aligned + 4 * kWords, high);
#pragma unroll
    for (int i = 0; i < kWords; ++i) both[i] = low[i], both[kWords + i] = high[i];
    shift_words<sizeof(T)>(both, shift, words);
}

template <typename T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

// A vector of 16 bytes, in words and in elements.
constexpr int kVectorWords = 4;
template <typename T>
constexpr int kVector = kVectorWords * kPerWord<T>;

// Words holding one float each, or two 16-bit elements, the first in the low half.
template <typename T, int kWords>
__device__ __forceinline__ void unpack(const uint32_t (&words)[kWords],
                                       float (&values)[kWords * kPerWord<T>]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        if constexpr (kPerWord<T> == 1) {
            values[i] = from_bits(words[i]);
        } else {
            values[2 * i] = load_float(T{static_cast<uint16_t>(words[i])});
            values[2 * i + 1] = load_float(T{static_cast<uint16_t>(words[i] >> 16)});
        }
    }
}

// `count` elements at p, the others zero. One or more vector accesses when all are there and the address
// allows.
template <typename T, int kCount>
__device__ __forceinline__ void load_elements(const T* p, int count, float (&values)[kCount]) {
    if (count >= kCount && is_aligned(p, min(16, kCount * static_cast<int>(sizeof(T))))) {
        uint32_t words[kCount / kPerWord<T>];
        load_words<false>(p, words);
        unpack<T>(words, values);
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = i < count ? load_float(p[i]) : 0.0f;
}

// Floats rounded to T, as one word. Two 16-bit elements take one packed conversion: alone, each would go
// through the slow unit that conversions share with division.
template <typename T>
__device__ __forceinline__ uint32_t pack_word(const float (&values)[kPerWord<T>]) {
    if constexpr (std::is_same_v<T, float>) {
        return to_bits(values[0]);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        const __half2 pair = __floats2half2_rn(values[0], values[1]);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
}

// Rounds values to T and back, by packed conversions.
template <typename T, int kCount>
__device__ __forceinline__ void round_all(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
        const uint32_t word[1] = {pack_word<T>({values[i], values[i + 1]})};
        float rounded[2];
        unpack<T>(word, rounded);
        values[i] = rounded[0];
        values[i + 1] = rounded[1];
    }
}

}  // namespace zerofp4::cuda
