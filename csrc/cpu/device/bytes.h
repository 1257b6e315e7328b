#pragma once
// Copies and transposes of bytes.

#include "cpu/device/parallel.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zerofp4::cpu::ZEROFP4_ISA {

// memcpy of at most kLimit bytes, about a thousand. Where GCC knows a copy to be that short, as a memcpy or
// as a loop that it recognizes, it makes "rep movs" of it, which takes longer to start than the copy takes;
// the empty asm prevents that.
template <int kLimit>
ZEROFP4_HD void copy_short(void* out, const void* in, int64_t bytes) {
    uint8_t* to = static_cast<uint8_t*>(out);
    const uint8_t* from = static_cast<const uint8_t*>(in);
    if constexpr (kLimit >= 32) {
        for (; bytes >= 32; bytes -= 32, to += 32, from += 32) {
            std::memcpy(to, from, 32);
            asm volatile("");
        }
    }
    if constexpr (kLimit >= 16) {
        if (bytes & 16) std::memcpy(to, from, 16), to += 16, from += 16;
    }
    if constexpr (kLimit >= 8) {
        if (bytes & 8) std::memcpy(to, from, 8), to += 8, from += 8;
    }
    if (bytes & 4) std::memcpy(to, from, 4), to += 4, from += 4;
    if (bytes & 2) std::memcpy(to, from, 2), to += 2, from += 2;
    if (bytes & 1) *to = *from;
}

// The same, in one go for the usual length.
template <int kUsual>
ZEROFP4_HD void copy_bytes(void* out, const void* in, int64_t bytes) {
    if (bytes == kUsual) {
        std::memcpy(out, in, kUsual);
    } else {
        copy_short<kUsual>(out, in, bytes);
    }
}

// x[i] where x may lie at any address, as a tensor over a part of a file does: memory that is not aligned is
// read as bytes. It takes the same instructions.
template <class T>
ZEROFP4_HD T element_at(const T* x, int64_t i) {
    T element;
    std::memcpy(&element, x + i, sizeof element);
    return element;
}

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

// With the row number over the column number as one number of eight bits, interleaving rows i and i + 8 into
// rows 2i and 2i + 1 rotates it by a bit. After four rounds rows and columns have changed places.
ZEROFP4_HD void rotate_index(const Bytes16 (&in)[16], Bytes16 (&out)[16]) {
    for (int i = 0; i < 8; ++i) interleave(in[i], in[i + 8], out[2 * i], out[2 * i + 1]);
}

// out[j][i] = in[i][j] for 64 rows, `stride` bytes apart, of which 16 columns are read: 16 x 16 bytes at a
// time.
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
