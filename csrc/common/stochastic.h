#pragma once
// Stochastic rounding to E2M1 with counter-based random bytes: the same for an element wherever and whenever
// it is computed.

#include "common/e2m1.h"

namespace zerofp4 {

// A block of Philox, or many at once.
template <class Word>
struct RandomWords {
    Word words[4];
};
using RandomBytes = RandomWords<uint32_t>;  // little endian: byte i is byte i % 4 of word i / 4

// The low word of a product, and the high one. On the GPU this is one instruction. The compiler is told so:
// of two products it does not always see that, and of a 64-bit one it adds up parts that are 0.
ZEROFP4_HD uint32_t multiply(uint32_t a, uint32_t b, uint32_t& high) {
#if ZEROFP4_DEVICE_CODE
    uint32_t low;
    asm("{.reg .b64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product;}"
        : "=r"(low), "=r"(high)
        : "r"(a), "r"(b));
    return low;
#else
    const uint64_t product = static_cast<uint64_t>(a) * b;
    high = static_cast<uint32_t>(product >> 32);
    return static_cast<uint32_t>(product);
#endif
}

// The halves of the number of a block.
ZEROFP4_HD uint32_t low_word(uint64_t block) { return static_cast<uint32_t>(block); }
ZEROFP4_HD uint32_t high_word(uint64_t block) { return static_cast<uint32_t>(block >> 32); }

// Philox4x32-10.
template <class Word>
ZEROFP4_HD RandomWords<Word> philox(Word c0, Word c1, Word c2, Word c3, uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if ZEROFP4_DEVICE_CODE
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        Word high0, high1;
        const Word low0 = multiply(0xd2511f53u, c0, high0);
        const Word low1 = multiply(0xcd9e8d57u, c2, high1);
        c0 = high1 ^ c1 ^ Word(k0);
        c1 = low1;
        c2 = high0 ^ c3 ^ Word(k1);
        c3 = low0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return {{c0, c1, c2, c3}};
}

enum RandomStream : uint32_t { kRowwiseStream = 0, kColumnwiseStream = 1 };

// The bytes of elements [16 * group, 16 * group + 16), counted row-major in the stored orientation.
template <class Group>
ZEROFP4_HD auto random_bytes(const int64_t* rng_state, Group group, uint32_t stream) {
    using Word = decltype(low_word(group));
    return philox(low_word(group), high_word(group), Word(static_cast<uint32_t>(rng_state[1])), Word(stream),
                  static_cast<uint64_t>(rng_state[0]));
}

// The grid step at a magnitude below 6 (above, some step): half of its power of two, at least 1/2.
ZEROFP4_HD float e2m1_step(float a) {
    const uint32_t exponent_bits = to_bits(a) & 0x7f800000u;
    return from_bits((exponent_bits > 0x3f800000u ? exponent_bits : 0x3f800000u) - 0x00800000u);
}

// A random byte r adds (r + 1/2) / 256 of a step, then the sum is rounded down. NaN gives code 7.
ZEROFP4_HD uint32_t float_to_e2m1_stochastic(float y, uint32_t r) {
    const uint32_t bits = to_bits(y);
    const float a = from_bits(bits & 0x7fffffffu);
    const float part = (static_cast<float>(static_cast<int32_t>(r)) + 0.5f) * (1.0f / 256.0f);
    const float sum = a + part * e2m1_step(a);
    const uint32_t t = to_bits(sum < kE2M1Max ? sum : kE2M1Max);  // 6 for NaN
    // From 1 on, the exponent and one bit of the mantissa count the codes.
    const uint32_t below_one = t >= to_bits(0.5f) ? 1u : 0u;
    const uint32_t code = t >= to_bits(1.0f) ? (t >> 22) - 252u : below_one;
    return code | (y == y ? (bits >> 28) & 8u : 0u);
}

}  // namespace zerofp4
