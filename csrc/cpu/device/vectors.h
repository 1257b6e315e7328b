#pragma once
// Vectors of this instruction set, for what the compiler makes no good loop of.

#include "cpu/device/parallel.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace zerofp4::cpu::ZEROFP4_ISA {

// What a vector register holds.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
constexpr int kFloats = kVectorBytes / static_cast<int>(sizeof(float));

// A float for each byte. AVX-512 looks up each of its four bytes for 64 elements at once, which takes a third
// of the time of gathers.
struct FloatTable {
#if defined(__AVX512VBMI__)
    alignas(kVectorBytes) uint8_t planes[4][256] = {};
#else
    float values[256] = {};
#endif

    constexpr explicit FloatTable(const float (&table)[256]) {
        for (int i = 0; i < 256; ++i) {
#if defined(__AVX512VBMI__)
            const uint32_t bits = __builtin_bit_cast(uint32_t, table[i]);
            for (int k = 0; k < 4; ++k) planes[k][i] = static_cast<uint8_t>(bits >> 8 * k);
#else
            values[i] = table[i];
#endif
        }
    }

#if defined(__AVX512VBMI__)
    static constexpr int kAtOnce = 64;
#else
    static constexpr int kAtOnce = 16;
#endif

    // value[i] = table[byte[i]]. `value` is aligned to kVectorBytes.
    void look_up(const uint8_t* byte, float (&value)[kAtOnce]) const {
#if defined(__AVX512VBMI__)
        // The unpacks below work within quarters of a vector, so words are put into their quarters first.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i index = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_loadu_si512(byte));
        const __mmask64 upper = _mm512_movepi8_mask(index);
        __m512i plane[4];
        for (int k = 0; k < 4; ++k) {
            const auto find = [&](const uint8_t* half) {
                const __m512i first = _mm512_load_si512(half), second = _mm512_load_si512(half + 64);
                return _mm512_permutex2var_epi8(first, index, second);
            };
            plane[k] = _mm512_mask_mov_epi8(find(planes[k]), upper, find(planes[k] + 128));
        }
        const auto interleave = [&](__m512i low, __m512i high, float* to) {
            _mm512_store_si512(to, _mm512_unpacklo_epi16(low, high));
            _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(low, high));
        };
        interleave(_mm512_unpacklo_epi8(plane[0], plane[1]), _mm512_unpacklo_epi8(plane[2], plane[3]), value);
        interleave(_mm512_unpackhi_epi8(plane[0], plane[1]), _mm512_unpackhi_epi8(plane[2], plane[3]),
                   value + 32);
#elif defined(__AVX2__)
        for (int i = 0; i < kAtOnce; i += 8) {
            const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(byte + i)));
            _mm256_store_ps(value + i, _mm256_i32gather_ps(values, index, sizeof(float)));
        }
#else
        for (int i = 0; i < kAtOnce; ++i) value[i] = values[byte[i]];
#endif
    }
};

}  // namespace zerofp4::cpu::ZEROFP4_ISA
