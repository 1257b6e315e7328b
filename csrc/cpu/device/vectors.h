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

// value[i] = table[byte[i]].
template <int kCount>
ZEROFP4_HD void look_up(const float (&table)[256], const uint8_t* byte, float (&value)[kCount]) {
    static_assert(kCount % kFloats == 0);
#if defined(__AVX2__)
    for (int i = 0; i < kCount; i += kFloats) {
#if defined(__AVX512F__)
        const __m512i index = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)(byte + i)));
        const Floats found = (Floats)_mm512_mask_i32gather_ps(__m512{}, 0xffff, index, table, sizeof(float));
#else
        const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(byte + i)));
        const Floats found = (Floats)_mm256_i32gather_ps(table, index, sizeof(float));
#endif
        std::memcpy(value + i, &found, sizeof found);
    }
#else
    for (int i = 0; i < kCount; ++i) value[i] = table[byte[i]];
#endif
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
