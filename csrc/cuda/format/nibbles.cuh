#pragma once
// Packed codes in registers: bytes and bits of several at once, transposition.

#include <cstdint>

namespace zerofp4::cuda {

// Bytes of two words; unlike __byte_perm it can fill a byte with another one's sign, by bit 3 of its nibble.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "n"(kSelector));
    return result;
}

// The same with a selector that is computed.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}

// The bits of `a` where the mask has ones, of `b` elsewhere: one instruction.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
    return (a & mask) | (b & ~mask);
}

// Adds the bits of `b` under a mask: one instruction, which the compiler would make two of where it sees more
// of these.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t or_masked(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xf8;" : "=r"(result) : "r"(a), "r"(b), "n"(kMask));
    return result;
}

// a, b, c and d are rows of a 4 x 4 matrix of bytes.
__device__ __forceinline__ void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410), b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410), d = __byte_perm(ab_high, cd_high, 0x7632);
}

// An 8 x 8 block of nibbles in 8 words: nibble j of word i becomes nibble i of word j. Halves of the words,
// then bytes, then single nibbles are exchanged between words 4, 2 and 1 apart.
__device__ __forceinline__ void transpose_nibbles(uint32_t (&words)[8]) {
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i & distance) continue;
            const uint32_t a = words[i], b = words[i + distance];
            if (distance == 1) {
                words[i] = select_bits(0x0f0f0f0fu, a, b << 4);
                words[i + 1] = select_bits(0x0f0f0f0fu, a >> 4, b);
            } else {
                words[i] = __byte_perm(a, b, distance == 4 ? 0x5410 : 0x6240);
                words[i + distance] = __byte_perm(a, b, distance == 4 ? 0x7632 : 0x7351);
            }
        }
    }
}

}  // namespace zerofp4::cuda
