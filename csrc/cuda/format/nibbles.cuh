#pragma once
// Packed codes in registers: bits of several at once, transposition.

#include <cstdint>

namespace zerofp4::cuda {

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
