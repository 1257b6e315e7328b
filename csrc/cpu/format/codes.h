#pragma once
// Codes of a row of 128 elements, and packing them two to a byte.

#include "common/dtype.h"
#include "common/e2m1.h"
#include "common/layout.h"
#include "cpu/device/bytes.h"

#if defined(__AVX2__) && !defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace zerofp4::cpu::ZEROFP4_ISA {

constexpr int kPatchBytes = kStripColumns / 2;  // a row of a patch, packed

// 32 codes to 16 bytes, the even ones in the low nibbles.
ZEROFP4_HD void pack32(const uint32_t (&code)[32], uint8_t* out) {
#if defined(__AVX512BW__)
    typedef uint64_t Pairs __attribute__((vector_size(64)));  // an even code, and an odd one 32 bits up
    typedef uint8_t Bytes __attribute__((vector_size(8)));
    for (int i = 0; i < 2; ++i) {
        Pairs pairs;
        std::memcpy(&pairs, code + 16 * i, sizeof pairs);
        const Bytes bytes = __builtin_convertvector(pairs | pairs >> 28, Bytes);
        std::memcpy(out + 8 * i, &bytes, sizeof bytes);
    }
#elif defined(__AVX2__)
    const __m256i* in = reinterpret_cast<const __m256i*>(code);
    const __m256i a = _mm256_packs_epi32(_mm256_loadu_si256(in), _mm256_loadu_si256(in + 1));
    const __m256i b = _mm256_packs_epi32(_mm256_loadu_si256(in + 2), _mm256_loadu_si256(in + 3));
    const __m256i bytes = _mm256_packus_epi16(a, b);  // each 128-bit half holds fours of all the inputs
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(16 << 8 | 1));  // even + 16 * odd
    const __m256i packed = _mm256_packus_epi16(pairs, pairs);
    const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi16(low, high));
#else
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
#endif
}

// Packs code(i) of 128 elements into 64 bytes.
template <class Code>
ZEROFP4_HD void pack_row(const Code& code, uint8_t* out) {
    for (int begin = 0; begin < kStripColumns; begin += 32) {
        uint32_t codes[32];
        for (int i = 0; i < 32; ++i) codes[i] = code(begin + i);
        pack32(codes, out + begin / 2);
    }
}

// Rounds 128 elements to W, scales each with its block's factor and packs their codes into 64 bytes.
template <class W, class T>
ZEROFP4_HD void encode_row(const T* x, const float (&encode)[kStripColumns], uint8_t* out) {
    pack_row([&](int i) { return float_to_e2m1(round_to<W>(load_float(element_at(x, i))) * encode[i]); },
             out);
}

// One factor per block to one per element.
ZEROFP4_HD void spread(const float* factor, float (&element)[kStripColumns]) {
    for (int t = 0; t < kStripColumns / kBlock; ++t) {
        for (int i = 0; i < kBlock; ++i) element[t * kBlock + i] = factor[t];
    }
}

// Copies elements [begin, end), at least one, of a packed row to `out`, whose byte 0 holds element `begin`.
// Leaves the other nibble of a first or last byte that is only half inside.
ZEROFP4_HD void store_codes(const uint8_t* packed, int64_t begin, int64_t end, uint8_t* out) {
    packed += begin / 2;
    if (begin % 2 != 0) {
        *out = static_cast<uint8_t>((*out & 0x0f) | (*packed & 0xf0));
        ++out, ++packed, ++begin;
    }
    const int64_t whole = (end - begin) / 2;
    copy_bytes<kPatchBytes>(out, packed, whole);
    if ((end - begin) % 2 != 0) {
        out[whole] = static_cast<uint8_t>((out[whole] & 0xf0) | (packed[whole] & 0x0f));
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
