#pragma once
// How the MXFP8 kernels cut a matrix: a warp has one unit, a lane 16 bytes of 16-bit or 32-bit elements in
// each of a few rows, all of them loaded before the first is used.

#include "common/args/mxfp8.h"
#include "cuda/device/units.cuh"
#include "cuda/device/vector.cuh"

namespace zerofp4::cuda {

struct Unit {
    int64_t row, col;
};

// The unit of this warp, out of `across` side by side; `block` counts the matrix's thread blocks. Matrices
// have fewer than 2^32 units.
template <int kRows, int kCols>
__device__ __forceinline__ Unit unit_of_warp(uint32_t block, uint32_t across) {
    const uint32_t unit = block * kWarps + static_cast<uint32_t>(warp_index());
    const uint32_t down = unit / across;
    return {static_cast<int64_t>(down) * kRows, static_cast<int64_t>(unit - down * across) * kCols};
}

// What exists of a lane's vectors, one of kCols elements at each step. In a whole unit it is all of them, and
// at aligned addresses.
template <int kSteps, int kCols, bool kWhole>
struct Extent {
    int rows;     // steps whose vector exists
    int columns;  // elements of it

    __device__ __forceinline__ Extent(int64_t rows_left, int64_t columns_left)
        : rows(clamp_count(rows_left, kSteps)), columns(clamp_count(columns_left, kCols)) {}

    __device__ __forceinline__ int count(int step) const {
        return kWhole ? kCols : step < rows ? columns : 0;
    }
};

__device__ __forceinline__ uint32_t raw_bits(uint8_t x) { return x; }
__device__ __forceinline__ uint32_t raw_bits(BFloat16 x) { return x.bits; }
__device__ __forceinline__ uint32_t raw_bits(Float16 x) { return x.bits; }
__device__ __forceinline__ uint32_t raw_bits(float x) { return to_bits(x); }

__device__ __forceinline__ void store_bits(uint8_t* p, uint32_t x) { *p = static_cast<uint8_t>(x); }
__device__ __forceinline__ void store_bits(BFloat16* p, uint32_t x) { p->bits = static_cast<uint16_t>(x); }
__device__ __forceinline__ void store_bits(Float16* p, uint32_t x) { p->bits = static_cast<uint16_t>(x); }
__device__ __forceinline__ void store_bits(float* p, uint32_t x) { *p = from_bits(x); }

// Elements side by side as words: one vector access where the unit is whole, otherwise one by one the first
// `count` of them; the others read as zero. kLastUse as for load_words.
template <bool kWhole, bool kLastUse, typename E, int kWords>
__device__ __forceinline__ void load_vector(const E* p, int count, uint32_t (&words)[kWords]) {
    if constexpr (kWhole && kWords == 1) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(p);
        words[0] = kLastUse ? __ldcs(from) : *from;
    } else if constexpr (kWhole) {
        load_words<kLastUse>(p, words);
    } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            words[i] = 0;
#pragma unroll
            for (int k = 0; k < kPerWord<E>; ++k) {
                const int at = kPerWord<E> * i + k;
                if (at < count) words[i] |= raw_bits(p[at]) << (k * 8 * static_cast<int>(sizeof(E)));
            }
        }
    }
}

template <bool kWhole, typename E, int kWords>
__device__ __forceinline__ void store_vector(E* p, int count, const uint32_t (&words)[kWords]) {
    if constexpr (kWhole && kWords == 1) {
        __stcs(reinterpret_cast<uint32_t*>(p), words[0]);
    } else if constexpr (kWhole && kWords == 2) {
        __stcs(reinterpret_cast<uint2*>(p), make_uint2(words[0], words[1]));
    } else if constexpr (kWhole) {
        __stcg(reinterpret_cast<uint4*>(p), make_uint4(words[0], words[1], words[2], words[3]));
    } else {
#pragma unroll
        for (int at = 0; at < kWords * kPerWord<E>; ++at) {
            const int shift = at % kPerWord<E> * 8 * static_cast<int>(sizeof(E));
            if (at < count) store_bits(p + at, words[at / kPerWord<E>] >> shift);
        }
    }
}

}  // namespace zerofp4::cuda
