#pragma once
// Transposition of packed codes in registers.

#include <cstdint>

namespace zerofp4::cuda {

constexpr int kLaneRows = 32;

// Four 8 x 8 blocks of nibbles, 8 words each: within block b, nibble j of word 8b + i becomes nibble i of
// word 8b + j. Halves of the words, then bytes, then single nibbles are exchanged between words 4, 2 and 1
// apart.
__device__ __forceinline__ void transpose_nibbles(uint32_t (&words)[kLaneRows]) {
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
        const int shift = 4 * distance;
        const uint32_t mask = distance == 4 ? 0x0000ffffu : distance == 2 ? 0x00ff00ffu : 0x0f0f0f0fu;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            if (i & distance) continue;
            const uint32_t exchanged = ((words[i] >> shift) ^ words[i + distance]) & mask;
            words[i + distance] ^= exchanged;
            words[i] ^= exchanged << shift;
        }
    }
}

}  // namespace zerofp4::cuda
