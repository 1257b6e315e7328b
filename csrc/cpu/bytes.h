#pragma once
// The transpose of a matrix of 64 x 16 bytes: 16 x 16 bytes at a time, by four rounds of interleaving.

#include "cpu/parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zerofp4::cpu::ZEROFP4_ISA {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// low and high: the 32 bytes a0 b0 a1 b1 ... a15 b15.
ZEROFP4_HD void interleave(const Bytes16& a, const Bytes16& b, Bytes16& low, Bytes16& high) {
#if defined(__SSE2__)
    low = (Bytes16)_mm_unpacklo_epi8((__m128i)a, (__m128i)b);
    high = (Bytes16)_mm_unpackhi_epi8((__m128i)a, (__m128i)b);
#else
    for (int i = 0; i < 8; ++i) {
        low[2 * i] = a[i], low[2 * i + 1] = b[i];
        high[2 * i] = a[i + 8], high[2 * i + 1] = b[i + 8];
    }
#endif
}

// With the row number over the column number as one number of eight bits, interleaving rows i and i + 8 into rows
// 2i and 2i + 1 rotates it by a bit. After four rounds rows and columns have changed places.
ZEROFP4_HD void rotate_index(const Bytes16 (&in)[16], Bytes16 (&out)[16]) {
    for (int i = 0; i < 8; ++i) interleave(in[i], in[i + 8], out[2 * i], out[2 * i + 1]);
}

// out[j][i] = in[i][j] for 64 rows of `stride` bytes, of which 16 columns are read.
ZEROFP4_HD void transpose_64x16(const uint8_t* in, int64_t stride, uint8_t (&out)[16][64]) {
    for (int block = 0; block < 64; block += 16) {
        Bytes16 a[16], b[16];
        for (int i = 0; i < 16; ++i) std::memcpy(&a[i], in + (block + i) * stride, 16);
        rotate_index(a, b);
        rotate_index(b, a);
        rotate_index(a, b);
        rotate_index(b, a);
        for (int i = 0; i < 16; ++i) std::memcpy(&out[i][block], &a[i], 16);
    }
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
